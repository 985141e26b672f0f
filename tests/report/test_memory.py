"""What a report says of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilefit.report import Report
from tilefit.report.html_page import render
from tilefit.report.report import MemoryMoment
from tilefit.report.text import memory


@pytest.fixture
def known(report: Report) -> Report:
    """A report that knows whose memory is, in a model with a hostile name."""
    owners = {"parameters": 1 << 30, "activations": 3 << 30}
    use = replace(
        report.step.memory,
        peak_bytes=4 << 30,
        owners=owners,
        modules={"<script>": 2 << 30, "": 1 << 30},
        timeline=(MemoryMoment(0, {"parameters": 1 << 30}), MemoryMoment(9, owners)),
        allocator_bytes=1 << 29,
        library_bytes=1 << 26,
        context_bytes=1 << 29,
    )
    return replace(report, step=replace(report.step, memory=use))


def test_owners_modules_and_what_comes_on_top(known: Report) -> None:
    assert memory(known) == [
        ("Memory", "parameters 1.00 GiB, activations 3.00 GiB"),
        ("Activations", "<script> 2.00 GiB, the model 1.00 GiB"),
        (
            "Beside them",
            "allocator 512 MiB, libraries 64.0 MiB, CUDA context, about 512 MiB: 5.06 GiB in all",
        ),
    ]


def test_without_a_timeline_the_sums_are_shown(report: Report) -> None:
    assert [label for label, _ in memory(report)] == ["Memory"]
    assert "activations 6.52 GiB" in memory(report)[0][1]
    assert "Memory over the operations" not in render(report)


def test_the_page_draws_the_timeline_and_escapes_names(known: Report) -> None:
    page = render(known)
    assert "Memory over the operations" in page
    assert "operation 9: 4.00 GiB" in page
    assert "&lt;script&gt; 2.00 GiB" in page
    assert "<script> 2.00 GiB" not in page
