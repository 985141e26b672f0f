"""The batch of the highest throughput that fits, found with few measurements."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log, log2

from tilefit.sweep.point import Point

#: Batches looked at per doubling.
PER_DOUBLING = 4
#: Measurements at most.
MOST_MEASUREMENTS = 6
#: A batch is measured only if it promises this much more than the best so far.
_LEAST_GAIN = 0.005
#: How much better a batch may turn out than the corrected prediction says, per doubling away from the nearest
#: one that was measured, and how many doublings count. Choices: more hope measures more batches.
_HOPE_PER_DOUBLING = 0.08
_MOST_DOUBLINGS = 2.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured step.

    Attributes:
        batch: Its samples.
        time_s, low_s, high_s: Median wall time, 20th and 80th percentile.
        memory_bytes: The most that the allocator held; 0 where it cannot tell.
    """

    batch: int
    time_s: float
    low_s: float
    high_s: float
    memory_bytes: int = 0

    @property
    def samples_per_s(self) -> float:
        """Samples of the mini-batch over the time of a step."""
        return self.batch / self.time_s


@dataclass
class Search:
    """What was found.

    Attributes:
        trials: The measurements, in order.
        too_large: Batches that ran out of memory.
    """

    trials: list[Trial] = field(default_factory=list)
    too_large: list[int] = field(default_factory=list)

    @property
    def measurements(self) -> int:
        """How many were made, those that ran out of memory among them."""
        return len(self.trials) + len(self.too_large)

    @property
    def best(self) -> Trial | None:
        """The highest throughput."""
        return max(self.trials, key=lambda trial: trial.samples_per_s, default=None)


def batches(most: int) -> tuple[int, ...]:
    """The batches to choose from: four per doubling."""
    found = [1]
    while found[-1] < most:
        stride = max(1, (1 << found[-1].bit_length() - 1) // PER_DOUBLING)
        found.append(found[-1] + stride)
    return tuple(batch for batch in found if batch <= most)


def best_batch(
    predicted: Sequence[Point],
    capacity_bytes: float,
    measure: Callable[[int], Trial | None],
    most: int = MOST_MEASUREMENTS,
) -> Search:
    """Measure where the prediction, corrected by what was measured so far, is highest.

    The ratio of measured to predicted throughput, and of memory, is taken to vary slowly with the batch:
    between measurements it is interpolated over the logarithm of the batch, beyond them it stays. The memory
    bounds what is tried; what runs out of memory bounds it for good. It ends when no batch promises half a
    per cent more than the best measured one.

    Args:
        predicted: Points that differ in their batch alone.
        capacity_bytes: Memory that a step may take.
        measure: Measures the step with a batch; None where it runs out of memory.
        most: Measurements at most.
    """
    known = {point.samples: point for point in predicted if point.samples and not point.error}
    found = Search()
    while found.measurements < most:
        best = found.best
        promises = {
            batch: point.items_per_s / point.items * batch * _promise(batch, known, found.trials)
            for batch, point in known.items()
            if batch not in {trial.batch for trial in found.trials}
            and batch < min(found.too_large, default=batch + 1)
            and point.memory_bytes * _memory_ratio(known, found.trials) <= capacity_bytes
        }
        if not promises:
            break
        batch = max(promises, key=lambda each: promises[each])
        if best and promises[batch] < (1 + _LEAST_GAIN) * best.samples_per_s:
            break
        trial = measure(batch)
        if trial:
            found.trials.append(trial)
        else:
            found.too_large.append(batch)
    return found


def _promise(batch: int, known: dict[int, Point], trials: Sequence[Trial]) -> float:
    """What to multiply a predicted throughput by: the measured ratio, and hope for what is far from it."""
    if not trials:
        return 1.0
    ratios = sorted(
        (log2(trial.batch), log(trial.samples_per_s * known[trial.batch].time_s / trial.batch))
        for trial in trials
    )
    at = log2(batch)
    place = bisect([x for x, _ in ratios], at)
    if place in (0, len(ratios)):
        ratio = ratios[min(place, len(ratios) - 1)][1]
    else:
        (x0, y0), (x1, y1) = ratios[place - 1], ratios[place]
        ratio = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    away = min(_MOST_DOUBLINGS, min(abs(at - x) for x, _ in ratios))
    return exp(ratio) * (1 + _HOPE_PER_DOUBLING * away)


def _memory_ratio(known: dict[int, Point], trials: Sequence[Trial]) -> float:
    """Measured over predicted memory of the largest batch that was measured."""
    largest = max(trials, key=lambda trial: trial.batch, default=None)
    if largest is None or not largest.memory_bytes or not known[largest.batch].memory_bytes:
        return 1.0
    return largest.memory_bytes / known[largest.batch].memory_bytes
