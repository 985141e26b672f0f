"""Lessons on a part of a report: the arithmetic is that of the report's own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from report.conftest import HOSTILE
from tilefit.errors import UsageError
from tilefit.formats import render
from tilefit.report import Report, explain


def words(report: Report, what: str = "") -> str:
    return render(explain(report, what), width=200)


def test_a_product_in_steps(report: Report) -> None:
    head = next(op for op in report.ops if op.module == "lm_head")
    index = report.ops.index(head)
    tiled = replace(head, tile=(128, 256), waves=128 * 197 / 100)
    shown = words(replace(report, ops=(*report.ops[:index], tiled, *report.ops[index + 1 :])), f"#{index}")
    assert "2 · 16384 · 50257 · 768 = 1.26 TFLOP; at the bf16 peak, 410 TFLOP/s: 3.09 ms" in shown
    assert "A 25.2 MB + B 77.2 MB + C 1.65 GB = 1.75 GB; at the memory's 4.00 TB/s: 437 µs" in shown
    assert "so at best 3.09 ms" in shown
    assert "⌈16384 / 128⌉ x ⌈50257 / 256⌉ = 128 x 197 = 25,216 tiles" in shown
    assert (
        "25,216 blocks over 100 SMs are 252.16 waves, which take the time of 253: the last one keeps 16"
        in shown
    )
    rows = [line for line in shown.splitlines() if line.endswith("×")]
    assert len(rows) == 10  # every row ends in a tile that reaches beyond C: 50257 is no multiple of 256
    assert "░" in rows[-1]
    assert "░" not in rows[0]
    assert "ALN002 saves 8.00 ms" in shown


def test_a_whole_wave_is_drawn_once(report: Report) -> None:
    one = replace(report.ops[0], product=(256, 256, 64, 1), tile=(128, 128), waves=0.04)
    shown = words(replace(report, ops=(one,)))
    assert "4 blocks over 100 SMs are 0.04 waves, which take the time of 1: the last one keeps 4 SMs" in shown
    assert "×" not in shown.replace("× reaches", "")


def test_a_finding_comes_with_its_operation(report: Report) -> None:
    shown = words(report, "aln002")
    assert "50257 = 29 x 1733; 50304 = 64 x 786" in shown
    assert "gemm 16384x50257x768 TN bf16" in shown
    assert "tilefit rule ALN002" in shown


def test_a_finding_without_a_price_has_no_interval(report: Report) -> None:
    unpriced = replace(report.findings[0], gain_s=0.0, gain_low_s=0.0, gain_high_s=0.0)
    text = str(explain(replace(report, findings=(unpriced,)), unpriced.code))
    assert "not priced" in text
    assert "not priced:" not in text


def test_operations_outside_of_all_modules_name_none(report: Report) -> None:
    ops = [replace(op, module="") for op in report.ops]
    text = str(explain(replace(report, ops=(ops[0], *ops))))
    assert "alike" in text
    assert "(in )" not in text


def test_a_layer_lists_what_runs_in_it(report: Report) -> None:
    assert "What runs: 4 operations" in words(report, "lm_head")
    assert "What runs: 13 operations" in words(report, "transformer.h.*.mlp")
    assert words(report, "optimizer").startswith("optimizer in gpt2")
    assert "one of 12 alike (in transformer.h.*.mlp.c_fc)" in words(report, "transformer.h.*.mlp.c_fc")


@pytest.mark.parametrize("what", ["lm_haed", "#99", "#-1", "#", "ALN999", "*.nothing"])
def test_what_is_not_there(report: Report, what: str) -> None:
    with pytest.raises(UsageError) as refused:
        explain(report, what)
    assert refused.value.hint


def test_names_of_the_users_code_are_no_markup(report: Report) -> None:
    named = replace(report, ops=tuple(replace(op, module=HOSTILE) for op in report.ops[:1]))
    assert "\x1b" not in words(named)
    assert "<script>" not in render(explain(named), "markdown")
    assert "<script>" not in explain(named)._repr_html_()
