"""From one report to another: what got faster or slower, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilefit.errors import UsageError
from tilefit.report import Comparison, Report, Watched
from tilefit.report.changes import Changes, changes
from tilefit.report.report import HostWait, MeasuredOp, MeasuredStep, OpRow


def _between(first: Report, second: Report) -> Changes:
    (only,) = changes(first, second)
    return only


def _with_op(report: Report, index: int, **values: Any) -> Report:
    ops = list(report.ops)
    ops[index] = replace(ops[index], **values)
    return replace(report, ops=tuple(ops))


def test_the_same_report_has_no_changes(report: Report) -> None:
    same = _between(report, report)
    assert (same.settings, same.ops, same.gone, same.new) == ((), (), (), ())


def test_how_often_a_program_waits_is_compared_with_another_and_with_a_run(of_program: Report) -> None:
    assert of_program.program is not None
    quiet = replace(of_program, program=replace(of_program.program, meetings=()))
    assert _between(of_program, quiet).settings == ("host waits a step 3 -> 0",)
    run = MeasuredStep("a run", 1, *[0.0] * 4, None, 0.0, 0, *[0.0] * 11)
    waits = (HostWait("cudaStreamSynchronize", "item", "", "train.py:41", 2, 1e-3),)
    ran = replace(of_program, program=None, measured=replace(run, waits=waits))
    assert "host waits a step 3 -> 2" in _between(of_program, ran).settings
    assert not any("waits" in each for each in _between(ran, ran).settings)
    bare = replace(of_program, program=None)
    assert _between(of_program, bare).settings == ()


def test_a_size_that_changed_is_named_with_what_followed_from_it(report: Report) -> None:
    slow = _with_op(report, 13, kernel_family="sm80", tile=(128, 128), waves=10.0)
    fast = _with_op(
        report,
        13,
        shape="16384x50304x768",
        product=(16384, 50304, 768, 1),
        tile=(256, 128),
        waves=2.5,
        time_s=2e-3,
        bound="memory",
        flop=2 * report.ops[13].flop,
    )
    (change,) = _between(slow, fast).ops
    assert (change.first, change.second) == ("gemm 16384x50257x768 TN bf16", "gemm 16384x50304x768 TN bf16")
    assert (change.module, change.phase, change.count) == ("lm_head", "forward", 1)
    assert change.slower_s == pytest.approx(-8e-3)
    assert change.reasons == (
        "n 50257 -> 50304",
        "sm80 -> sm90 kernels",
        "tile 128x128 -> 256x128",
        "waves 10.0 -> 2.50",
        "limited by math -> memory",
        "2.00 times the arithmetic",
    )


def test_layout_type_and_shape_are_reasons(report: Report) -> None:
    gelu = _with_op(report, 12, dtype="fp32", shape="1000", time_s=1e-3)
    (change,) = _between(report, gelu).ops
    assert change.reasons == ("shape 50331648 -> 1000", "bf16 -> fp32")
    (change,) = _between(report, _with_op(report, 13, layout="NN", time_s=11e-3)).ops
    assert change.reasons == ("layout TN -> NN",)


def test_the_kernels_of_measured_runs_are_reasons(report: Report) -> None:
    def ran(*kernels: str, time_s: float) -> Report:
        measured = MeasuredOp(1e-3, kernels, True, False, 1e12, 1e9, 0.5)
        return _with_op(report, 13, measured=measured, time_s=time_s)

    (change,) = _between(ran("ampere_gemm", time_s=1e-3), ran("nvjet", "split_k", time_s=2e-3)).ops
    assert change.reasons == ("ran ampere_gemm -> nvjet, split_k",)


def test_layers_that_changed_alike_are_one_row(report: Report) -> None:
    wider = tuple(
        replace(op, shape="16384x4096x768", product=(16384, 4096, 768, 1), time_s=2e-3)
        if op.module.endswith("c_fc")
        else op
        for op in report.ops
    )
    (change,) = _between(report, replace(report, ops=wider)).ops
    assert (change.module, change.count) == ("transformer.h.*.mlp.c_fc", 12)
    assert (change.first_s, change.second_s) == (pytest.approx(12e-3), pytest.approx(24e-3))
    assert change.reasons == ("n 3072 -> 4096",)


def test_operations_that_only_one_has(report: Report) -> None:
    # The activation and the unknown operation go away, as they do when a block is compiled.
    fewer = replace(report, ops=tuple(op for op in report.ops if op.kind not in ("pointwise", "other")))
    gone, other = _between(report, fewer).ops
    assert (gone.first, gone.second, gone.reasons) == ("pointwise", "", ("only in A",))
    assert (gone.first_s, gone.second_s) == (pytest.approx(0.5e-3), 0.0)
    assert other.first == "other"
    back, _ = _between(fewer, report).ops
    assert (back.first, back.second, back.reasons) == ("", "pointwise", ("only in B",))


def test_the_same_shape_is_matched_before_the_order_of_the_step(report: Report) -> None:
    # Two products of one module; the second report runs a third one before them.
    first, second = report.ops[13], replace(report.ops[13], shape="8x8x8", product=(8, 8, 8, 1), time_s=1e-6)
    third = replace(first, shape="9x9x9", product=(9, 9, 9, 1), time_s=2e-6)
    before = replace(report, ops=(first, second))
    (change,) = _between(before, replace(report, ops=(third, first, second))).ops
    assert (change.second, change.reasons) == ("gemm 9x9x9 TN bf16", ("only in B",))


def test_as_many_operations_of_a_place_are_matched_in_their_order(report: Report) -> None:
    # On twice the batch the second one has the first one's old shape.
    large, small = (replace(report.ops[13], shape=f"{n}x8x8", product=(n, 8, 8, 1)) for n in (64, 32))
    doubled = replace(large, shape="128x8x8", product=(128, 8, 8, 1), time_s=2 * large.time_s)
    before, after = (replace(report, ops=ops) for ops in ((large, small), (doubled, large)))
    (change,) = _between(before, after).ops
    assert (change.first, change.second) == ("gemm 64x8x8 TN bf16", "gemm 128x8x8 TN bf16")


def test_an_operation_that_is_the_same_has_its_reason_elsewhere(
    report: Report, comparison: Comparison
) -> None:
    big, small = comparison.reports
    rows = _between(big, small).ops
    assert {reason for row in rows for reason in row.reasons} == {"GPU big -> small"}
    later = replace(
        report, version="9.9", profile="measured again", ops=(replace(report.ops[0], time_s=1.0),)
    )
    (row, *_) = _between(report, later).ops
    assert row.reasons == ("measurements none -> measured again", f"tilefit {report.version} -> 9.9")


def test_settings_that_differ_are_told(report: Report) -> None:
    other = replace(
        report, batch=32, inputs=("x: fp32[2]",), settings=replace(report.settings, amp="", compiled=True)
    )
    assert _between(report, other).settings == (
        "inputs input_ids: int64[16,1024] -> x: fp32[2]",
        "batch 16 -> 32",
        "amp bf16 -> none",
        "compiled off -> on",
    )


def test_findings_that_are_gone_and_new(report: Report) -> None:
    first, second = report.findings
    moved = replace(second, module="elsewhere")
    between = _between(report, replace(report, findings=(replace(first, gain_s=1.0), moved)))
    assert (between.gone, between.new) == ((second,), (moved,))


def test_gpus_are_compared_each_with_itself(comparison: Comparison) -> None:
    first, second = comparison.reports
    pairs = changes(comparison, Comparison((second, first)))
    assert [(each.first.gpu, each.second.gpu) for each in pairs] == [("big", "big"), ("small", "small")]
    assert [each.settings for each in pairs] == [(), ()]
    # A GPU that only one of them has is told.
    (pair,) = changes(comparison, first)
    assert pair.settings == (f"{second.device.title} only in A: not compared",)
    (pair,) = changes(second, comparison)
    assert pair.settings == (f"{first.device.title} only in B: not compared",)
    # One report against another is a comparison of their GPUs.
    assert len(changes(first, second)) == 1
    with pytest.raises(UsageError, match="no GPU in common"):
        changes(comparison, Comparison((replace(first, gpu="x"), replace(first, gpu="y"))))


def test_a_watched_run_has_no_times(report: Report, watched: Watched) -> None:
    with pytest.raises(UsageError, match="no times to compare"):
        changes(report, watched)


_OPS = st.lists(
    st.builds(
        OpRow,
        kind=st.sampled_from(["gemm", "pointwise"]),
        phase=st.sampled_from(["forward", "backward-data"]),
        module=st.sampled_from(["a", "b", ""]),
        source=st.just(""),
        dtype=st.sampled_from(["bf16", "fp32"]),
        shape=st.sampled_from(["1", "2", "3"]),
        layout=st.just(""),
        time_s=st.sampled_from([1.0, 2.0, 4.0]),
        bound=st.just("math"),
        provenance=st.just("estimated"),
        low_s=st.just(0.0),
        high_s=st.just(9.0),
        name=st.sampled_from(["aten.mm", "aten.add"]),
        flop=st.integers(0, 4),
        moved_bytes=st.integers(0, 4),
        kernel_family=st.sampled_from(["sm80", "sm90"]),
    ),
    max_size=12,
)


@given(first=_OPS, second=_OPS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_changes_add_up_to_that_of_the_step(
    report: Report, first: list[OpRow], second: list[OpRow]
) -> None:
    before, after = replace(report, ops=tuple(first)), replace(report, ops=tuple(second))
    rows = _between(before, after).ops
    total_s = sum(op.time_s for op in second) - sum(op.time_s for op in first)
    assert sum(row.slower_s for row in rows) == pytest.approx(total_s)
    # Backwards, everything is the other way round.
    back = _between(after, before).ops
    assert sorted(row.slower_s for row in rows) == pytest.approx(sorted(-row.slower_s for row in back))
