"""How many measurements the best batch takes, on curves that the prediction gets wrong in several ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tilefit.sweep.best import MOST_MEASUREMENTS, Search, Trial, batches, best_batch
from tilefit.sweep.point import Point

GIB = 1 << 30


def saturating(batch: int) -> float:
    """Samples a second that approach 1000."""
    return 1000 * batch / (batch + 8)


def predicted(rate: Callable[[int], float] = saturating, most: int = 512, gib: float = 0.5) -> list[Point]:
    return [
        Point(
            {"batch": batch},
            "h200",
            time_s=batch / rate(batch),
            samples=batch,
            items=batch,
            memory_bytes=int((4 + gib * batch) * GIB),
        )
        for batch in batches(most)
    ]


def search(
    points: list[Point], real: Callable[[int], float], capacity_gib: float = 132, needs_gib: float = 0.5
) -> Search:
    def measure(batch: int) -> Trial | None:
        memory = int((4 + needs_gib * batch) * GIB)
        if memory > capacity_gib * GIB:
            return None
        time_s = batch / real(batch)
        return Trial(batch, time_s, time_s, time_s, memory)

    return best_batch(points, capacity_gib * GIB, measure)


def fitting(real: Callable[[int], float], capacity_gib: float = 132, needs_gib: float = 0.5) -> float:
    """The highest throughput among all batches that fit."""
    return max(real(b) for b in batches(512) if 4 + needs_gib * b <= capacity_gib)


def test_batches_are_four_per_doubling() -> None:
    assert batches(40) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)


CURVES: dict[str, Callable[[int], float]] = {
    "as predicted": saturating,
    "all slower": lambda batch: 0.6 * saturating(batch),
    "falls behind 64": lambda batch: saturating(batch) * (1.0 if batch <= 64 else 0.9),
    "falls slowly": lambda batch: saturating(batch) * (1 - 0.0008 * batch),
    "knee later": lambda batch: 1000 * batch / (batch + 60),
    "a dip at the end": lambda batch: saturating(batch) * (0.85 if batch >= 224 else 1.0),
}


@pytest.mark.parametrize("name", CURVES)
def test_within_two_per_cent_in_six_measurements(name: str) -> None:
    real = CURVES[name]
    found = search(predicted(), real)
    assert found.best is not None
    assert found.measurements <= MOST_MEASUREMENTS
    assert found.best.samples_per_s >= 0.98 * fitting(real)


def test_memory_bounds_what_is_tried() -> None:
    found = search(predicted(), saturating, capacity_gib=20)
    assert found.too_large == []
    assert found.best is not None
    assert found.best.batch == 32  # 4 + 0.5 x 32 = 20


def test_running_out_of_memory_is_survived_and_bounds_the_rest() -> None:
    """The model needs twice what was predicted."""
    found = search(predicted(), saturating, capacity_gib=68, needs_gib=1.0)
    assert found.too_large[0] == 128
    assert found.measurements <= MOST_MEASUREMENTS
    assert found.best is not None
    assert found.best.samples_per_s >= 0.98 * fitting(saturating, 68, 1.0)
    assert all(trial.batch < min(found.too_large) for trial in found.trials)


def test_measured_memory_corrects_the_bound() -> None:
    """A little more memory than predicted: what was measured keeps the others within."""
    points = [p for p in predicted() if p.samples != 256]
    found = search(points, lambda b: float(b), capacity_gib=130, needs_gib=0.6)
    assert len(found.too_large) <= 2
    assert found.best is not None


def test_nothing_fits() -> None:
    found = search(predicted(), saturating, capacity_gib=1)
    assert (found.measurements, found.best) == (0, None)


def test_points_without_a_step_are_left_out() -> None:
    points = [replace(point, error="no") if point.samples > 8 else point for point in predicted()]
    found = search(points, saturating)
    assert found.best is not None
    assert found.best.batch == 8
