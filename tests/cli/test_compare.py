"""``tilefit compare`` of two reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from builders import StepBuilder
from report.conftest import FINDINGS, GPU, HOSTILE, STEP, estimate
from tilefit.capture import child
from tilefit.ops import Step
from tilefit.report import build
from tilefit.report.markdown import LIMIT_BYTES


def _step(features: int) -> Step:
    builder = StepBuilder()
    builder.linear("net.up", 65536, 4096, features)
    return builder.step()


@pytest.fixture
def reports(tilefit, monkeypatch: pytest.MonkeyPatch) -> None:
    """``a.json`` of a layer with an odd size, ``b.json`` of one without; capture is replaced."""
    monkeypatch.setattr(
        child, "capture_in_child", lambda target, *_, **__: _step(int(target.partition(":")[2]))
    )
    for name, features in (("a", 4095), ("b", 4096)):
        options = ("--gpu", "h200", "--output-format", "json", "--output-file", f"{name}.json")
        tilefit("check", f"net:{features}", *options)


def test_it_says_what_got_faster_and_why(tilefit, reports: None) -> None:
    ran = tilefit("compare", "a.json", "b.json")
    assert (ran.code, ran.err) == (0, "")
    assert " times as fast as A: " in ran.out.splitlines()[0]
    assert "n 4095 -> 4096" in ran.out
    assert "Gone: ALN001" in ran.out
    back = tilefit("compare", "b.json", "a.json").out
    assert " times as slow as A" in back
    assert "New: ALN001" in back


def test_the_same_report_twice(tilefit, reports: None) -> None:
    out = tilefit("compare", "a.json", "a.json").out
    assert out.startswith("B is as fast as A")
    assert out.endswith("The two are the same.\n")


def test_what_is_not_listed_is_summed_up(tilefit, reports: None) -> None:
    short, whole = (tilefit("compare", "a.json", "b.json", "--limit", n).out for n in ("1", "0"))
    assert "2 more, together -" in short
    assert (short.count("sm90 kernels"), whole.count("sm90 kernels")) == (1, 3)
    assert "more, together" not in whole


def test_as_json_and_as_markdown(tilefit, reports: None, tmp_path: Path) -> None:
    (change,) = json.loads(tilefit("compare", "a.json", "b.json", "--output-format", "json").out)["changes"]
    assert change["first"]["step"]["time_s"] > change["second"]["step"]["time_s"]
    slower_s = sum(op["second_s"] - op["first_s"] for op in change["ops"])
    gpu_s = [change[side]["step"]["gpu_time_s"] for side in ("first", "second")]
    assert slower_s == pytest.approx(gpu_s[1] - gpu_s[0])
    assert "ALN001" in {finding["code"] for finding in change["gone"]}
    ran = tilefit("compare", "a.json", "b.json", "--output-format", "markdown", "--output-file", "c.md")
    assert (ran.code, ran.out) == (0, "")
    text = (tmp_path / "c.md").read_text()
    assert text.startswith("# B is ")
    assert "n 4095 -\\> 4096" in text
    assert len(text.encode()) <= LIMIT_BYTES


def test_text_goes_to_a_file_without_colour(tilefit, reports: None, tmp_path: Path) -> None:
    shown = tilefit("compare", "a.json", "b.json").out
    assert tilefit("compare", "a.json", "b.json", "--output-file", "c.txt").out == ""
    assert (tmp_path / "c.txt").read_text().split() == shown.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.json", "nope.json"], "nope.json: cannot be read"),
        (["a.json", "store.db"], "one is a report and the other holds measurements"),
        (["x.db", "y.db"], "x.db: no such file"),
        (["a.json", "x.db"], "x.db: no such file"),
        (["folder", "a.json"], "folder: a folder, not a file"),
        (["a.json", "page.html"], "page.html: neither a report nor measurements"),
        (["x.db", "y.db", "--output-format", "json"], "measurements are compared as text"),
        (
            ["a.json", "b.json", "--output-file", "page.html"],
            "page.html: no format has files that end in .html",
        ),
        (["page.html", "page.html"], "page.html: neither a report nor measurements"),
    ],
)
def test_what_cannot_be_compared_is_one_message(
    tilefit, reports: None, tmp_path: Path, arguments: Sequence[str], message: str
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "store.db").write_bytes(b"SQLite format 3\0")
    ran = tilefit("compare", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert page.read_text() == "mine"


# ---- how it looks ------------------------------------------------------------------------------


@pytest.fixture
def synthetic(tilefit, tmp_path: Path) -> None:
    """Reports of round numbers: ``a.json``; and ``b.json``, padded, without an operation and a finding."""
    report = build(STEP, GPU, estimate(), FINDINGS)
    (tmp_path / "a.json").write_text(report.to_json())
    head = replace(
        report.ops[13], shape="16384x50304x768", product=(16384, 50304, 768, 1), time_s=2e-3, bound="memory"
    )
    ops = (*report.ops[:12], head, *report.ops[14:])
    step = replace(report.step, time_s=31.5e-3, gpu_time_s=31.5e-3)
    second = replace(report, model="padded", step=step, ops=ops, findings=report.findings[1:])
    (tmp_path / "b.json").write_text(second.to_json())


def test_as_text(tilefit, synthetic: None) -> None:
    assert tilefit("compare", "a.json", "b.json").out == snapshot("""\
B is 1.27 times as fast as A: padded · training step on Big GPU 100GB
model gpt2 -> padded

                         A            B  B / A
time               40.0 ms      31.5 ms  0.787
GPU busy           40.0 ms      31.5 ms  0.787
host               5.00 ms      5.00 ms  1.000
rate           118 TFLOP/s  118 TFLOP/s  1.000
memory            9.31 GiB     9.31 GiB  1.000
largest batch          184          184  1.000

   B - A        A        B  operation                 why
-8.00 ms  10.0 ms  2.00 ms  gemm 16384x50304x768 TN   n 50257 -> 50304, limited
                            bf16 fwd lm_head          by math -> memory
 -500 µs   500 µs           pointwise fwd             only in A
                            transformer.h.0.mlp.act

Gone: ALN002 lm_head saves 8.00 ms (20.0 %)
""")


def test_as_markdown(tilefit, synthetic: None) -> None:
    assert tilefit("compare", "a.json", "b.json", "--output-format", "markdown").out == snapshot("""\
# B is 1.27 times as fast as A: padded · training step on Big GPU 100GB

model gpt2 -\\> padded

|  | A | B | B / A |
| --- | --- | --- | --- |
| time | 40.0 ms | 31.5 ms | 0.787 |
| GPU busy | 40.0 ms | 31.5 ms | 0.787 |
| host | 5.00 ms | 5.00 ms | 1.000 |
| rate | 118 TFLOP/s | 118 TFLOP/s | 1.000 |
| memory | 9.31 GiB | 9.31 GiB | 1.000 |
| largest batch | 184 | 184 | 1.000 |

- Gone: ALN002 lm\\_head saves 8.00 ms (20.0 %)

## Operations

| B - A | A | B | operation | why |
| --- | --- | --- | --- | --- |
| -8.00 ms | 10.0 ms | 2.00 ms | gemm 16384x50304x768 TN bf16 fwd lm\\_head | n 50257 -\\> 50304, limited by math -\\> memory |
| -500 µs | 500 µs |  | pointwise fwd transformer.h.0.mlp.act | only in A |
""")  # noqa: E501


def test_names_cannot_become_markup(tilefit, tmp_path: Path) -> None:
    report = build(STEP, GPU, estimate(), FINDINGS)
    ops = tuple(replace(op, module=HOSTILE, name=HOSTILE) for op in report.ops)
    findings = tuple(replace(finding, module=HOSTILE) for finding in report.findings)
    (tmp_path / "a.json").write_text(replace(report, model=HOSTILE, ops=ops, findings=findings).to_json())
    (tmp_path / "b.json").write_text(replace(report, ops=(), findings=()).to_json())
    out = tilefit("compare", "a.json", "b.json", "--limit", "0").out
    assert out.count("[red]<script>alert(1)</script>") == out.count("<script>") > 2
    assert "\x1b" not in out
