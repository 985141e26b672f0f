"""What a report comes down to."""

from __future__ import annotations

from dataclasses import replace

from tilefit.report import Report, render
from tilefit.report.answer import answer, best
from tilefit.report.report import Combination


def told(report: Report, *times: tuple[tuple[int, ...], float], safety: str = "safe") -> Report:
    """The report where some of its findings, all of a kind, take so long together."""
    findings = tuple(replace(each, safety=safety) for each in report.findings)
    return replace(report, findings=findings, combinations=tuple(Combination(*each) for each in times))


def test_it_says_what_to_do_and_what_that_is_worth(report: Report) -> None:
    found = answer(
        replace(told(report, ((0,), 32e-3), ((1,), 39e-3), ((0, 1), 20e-3)), tokens=1024), {"": 3.6}
    )
    assert found.title == "40.0 ms → about 20.0 ms: do these two things"
    assert found.lines == (
        "410,000 → 819,000 tokens per second",
        "2.0 times the tokens for the money",
        "2.44 → 1.22 per billion tokens, at 3.60 per GPU and hour",
    )


def test_one_thing_is_enough_where_a_second_adds_nothing(report: Report) -> None:
    times = (((0,), 20.2e-3), ((1,), 39e-3), ((0, 1), 20e-3))
    found = answer(replace(told(report, *times), tokens=0))
    assert (found.title, found.findings) == ("40.0 ms → about 20.2 ms: do this", (0,))
    assert found.lines[0] == "400 → 792 samples per second"


def test_advice_is_for_where_nothing_is_safe_and_training_is_never_changed(report: Report) -> None:
    times = (((0,), 30e-3),)
    assert best(told(report, *times, safety="advice")).findings == (0,)
    assert best(told(report, *times, safety="unsafe")).findings == ()
    assert (
        answer(told(report, *times, safety="unsafe")).title
        == "40.0 ms a step: no change has a price worth it"
    )


def test_what_does_not_fit_says_so_first(report: Report) -> None:
    small = replace(report, device=replace(report.device, memory_bytes=4_000_000_000))
    assert answer(small).title == (
        "Does not fit: 9.31 GiB of 3.73 GiB; needs 3 GPUs at least, or a smaller batch"
    )


def test_prices_are_of_a_gpu(report: Report) -> None:
    assert not any("hour" in line for line in answer(report, {"other": 2.0}).lines)
    assert any("at 2.00 per GPU and hour" in line for line in answer(report, {"big": 2.0, "": 9.0}).lines)
    assert "per GPU and hour" in render(report, prices={"": 2.0}, width=200)
    assert "per GPU and hour" in report.to_html(price=2.0)


def test_without_findings_or_samples(report: Report) -> None:
    bare = answer(replace(report, findings=(), batch=0), {"": 1.0})
    assert (bare.title, bare.lines) == ("40.0 ms a step: nothing is known that would pay", ())
