"""A line per finding."""

from __future__ import annotations

from inline_snapshot import snapshot

from tilefit.report import Comparison, Report, render


def test_a_report(report: Report) -> None:
    assert render(report, "concise") == snapshot("""\
transformers/models/gpt2/modeling_gpt2.py:712: ALN002 The vocabulary of 50257 is odd, so the three products of the head cannot use TMA. [saves 8.00 ms (20.0 %)]
model.py:42: NTC003 A chain of 3 pointwise operations reads and writes its activation 3 times. [saves 1.20 ms (3.0 %)]
""")


def test_a_comparison_names_the_gpu(comparison: Comparison) -> None:
    assert render(comparison, "concise") == snapshot("""\
transformers/models/gpt2/modeling_gpt2.py:712: ALN002 The vocabulary of 50257 is odd, so the three products of the head cannot use TMA. [saves 8.00 ms (20.0 %)] on big
model.py:42: NTC003 A chain of 3 pointwise operations reads and writes its activation 3 times. [saves 1.20 ms (3.0 %)] on big
gpt2: BAT002 The step needs 12 GiB, the GPU has 10 GiB. [cannot run] on small
transformers/models/gpt2/modeling_gpt2.py:712: ALN002 The vocabulary of 50257 is odd, so the three products of the head cannot use TMA. [saves 8.00 ms (25.0 %)] on small
""")


def test_nothing_found_is_no_line(healthy: Report) -> None:
    assert render(healthy, "concise") == ""


def test_a_finding_stays_on_one_line_whatever_its_names(hostile: Report) -> None:
    assert len(render(hostile, "concise").splitlines()) == 1
