from __future__ import annotations

from tilefit.sweep.point import Point, best, by_latency, by_memory


def point(batch: int, time_s: float, memory: int = 1, **more: object) -> Point:
    given = {"at": {"batch": batch}, "gpu": "h200", "samples": batch, "items": batch, "flop": batch}
    return Point(**{**given, "time_s": time_s, "memory_bytes": memory, **more})  # type: ignore[arg-type]


def test_the_frontier_has_what_nothing_beats() -> None:
    slow = point(4, 5.0)  # 0.8 a second
    small = point(2, 1.0)  # 2 a second, at once
    wide = point(12, 4.0)  # 3 a second
    beaten = point(8, 4.5)  # 1.8 a second, later than small
    assert by_latency([slow, wide, beaten, small]) == [small, wide]


def test_what_does_not_fit_or_run_is_on_no_frontier() -> None:
    fine = point(2, 1.0)
    assert by_latency([fine, point(9, 1.0, fits=False), point(0, 0.0, error="no")]) == [fine]
    assert best([point(9, 1.0, fits=False), fine]) is fine
    assert best([point(9, 1.0, fits=False)]) is None


def test_memory_is_another_frontier() -> None:
    small, wide, wasteful = point(2, 1.0, memory=10), point(12, 4.0, memory=30), point(12, 4.4, memory=40)
    assert by_memory([wasteful, wide, small]) == [small, wide]


def test_only_the_same_model_on_the_same_gpu_competes() -> None:
    narrow = point(2, 1.0, at={"batch": 2, "hidden": 64})
    wide = point(2, 3.0, at={"batch": 2, "hidden": 128})
    other = point(2, 9.0, at={"batch": 2, "hidden": 64}, gpu="l4")
    mixed = point(2, 0.5, at={"batch": 2, "hidden": 64, "amp": "bf16"})
    assert by_latency([narrow, wide, other, mixed]) == [mixed, wide, other]


def test_throughput_is_compared_per_gpu() -> None:
    one, four = point(8, 1.0), point(8, 0.5, gpus=4)
    assert four.items_per_s == 16
    assert best([one, four]) is one
    assert by_latency([one, four]) == [four, one]


def test_a_measured_point_is_known_better_than_a_predicted_one() -> None:
    measured = point(4, 1.0, provenance="measured")
    assert best([measured, point(8, 1.0, provenance="estimated")]) is measured


def test_rates() -> None:
    each = point(8, 2.0)
    assert (each.items_per_s, each.flop_per_s) == (4.0, 4.0)
    assert (point(0, 0.0).items_per_s, point(0, 0.0).flop_per_s) == (0.0, 0.0)
    assert point(1, 0.0, error="no").to_dict() == {"at": {"batch": 1}, "gpu": "h200", "error": "no"}
