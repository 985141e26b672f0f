"""What a report says of a step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tilefit.ops import Memory, Program, Step
from tilefit.report import Comparison, Report


def test_the_contract_of_the_json(report: Report) -> None:
    data = json.loads(report.to_json())
    assert data["schema_version"] == 1
    assert data["gpu"] == "big"
    assert {"time_s", "gpu_time_s", "flop", "memory_bytes"} <= data["step"].keys()
    assert 0 <= data["coverage"] <= 1
    finding = data["findings"][0]
    assert {
        "code",
        "severity",
        "module",
        "source",
        "message",
        "gain_s",
        "gain_fraction",
        "fix",
    } <= finding.keys()
    operation = data["ops"][0]
    assert operation.keys() >= {
        *("kind", "phase", "module", "source", "dtype", "shape"),
        *("layout", "time_s", "bound", "provenance"),
    }
    assert (operation["kind"], operation["shape"], operation["layout"]) == ("gemm", "16384x3072x768", "TN")


def test_the_rate_counts_matrix_arithmetic_over_the_whole_step(report: Report) -> None:
    # 12 products of 16384x3072x768 and three of 16384x50257x768, in 40 ms.
    flop = 2 * 16384 * 768 * (12 * 3072 + 3 * 50257)
    assert report.step.tensor_flop == flop
    assert report.step.flop_per_s == pytest.approx(flop / 40e-3)
    # 100 SMs x 1 GHz x 4096 FLOP per clock.
    assert report.device.peak_dtype == "bf16"
    assert report.step.peak_share == pytest.approx(flop / 40e-3 / 409.6e12)


def test_time_by_kind_and_by_phase_add_up_to_the_gpu_time(report: Report) -> None:
    assert sum(report.step.kinds_s.values()) == pytest.approx(report.step.gpu_time_s)
    assert sum(report.step.phases_s.values()) == pytest.approx(report.step.gpu_time_s)
    assert report.step.kinds_s["optimizer"] == pytest.approx(2.4e-3)


def test_an_operation_the_model_does_not_know_lowers_the_coverage_and_is_named(report: Report) -> None:
    assert [(op.name, op.count, op.moved_bytes) for op in report.unmodelled] == [("mylib.scan", 1, 4_000_000)]
    assert report.coverage == pytest.approx(1 - 1000 / report.step.flop)
    assert report.coverage_time == pytest.approx(1 - 0.1e-3 / 40e-3)


def test_the_largest_batch_leaves_room_for_what_does_not_grow(report: Report) -> None:
    # 2 GB are fixed, 8 GB are the activations of 16 samples; of the 94 GB that tensors can take 92 are left.
    assert report.step.largest_batch == 184
    memory = Memory(parameter_bytes=100, peak_bytes=180)
    assert Step((), memory, batch=4).largest_batch(200) == 5
    assert Step((), memory, batch=4).largest_batch(90) == 0
    # Of a pipeline all stages need room.
    fuller = Step((), replace(memory, peak_bytes=220), batch=4, program=Program("", "", rank=1))
    assert fuller.largest_batch(200) == 3
    assert Step((), memory, batch=4, ranks=(fuller,)).largest_batch(200) == 3


def test_the_largest_batch_is_unknown_without_a_batch_or_activations() -> None:
    assert Step((), Memory(parameter_bytes=100, peak_bytes=180)).largest_batch(200) is None
    assert Step((), Memory(parameter_bytes=100, peak_bytes=100), batch=4).largest_batch(200) is None


def test_the_exit_code_says_whether_anything_was_found(
    report: Report, healthy: Report, comparison: Comparison
) -> None:
    assert report.exit_code == 1
    assert healthy.exit_code == 0
    assert comparison.exit_code == 1
    assert Comparison((healthy, healthy)).exit_code == 0


def test_a_comparison_holds_a_report_per_gpu(comparison: Comparison) -> None:
    assert [report["gpu"] for report in comparison.to_dict()["reports"]] == ["big", "small"]
    assert comparison["small"].device.title == "Small GPU 10GB"
    with pytest.raises(KeyError):
        comparison["huge"]
