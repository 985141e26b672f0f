"""Two sets of measurements, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from tilefit.measure.store import Measurement
from tilefit.ops import Op


@dataclass(frozen=True, slots=True)
class Pair:
    """One operation in both sets.

    Attributes:
        op: The operation.
        first_s, second_s: Its median times.
        noise: The larger relative spread of the two; a ratio within it says nothing.
    """

    op: Op
    first_s: float
    second_s: float
    noise: float

    @property
    def ratio(self) -> float:
        """second / first: above 1, the second is slower."""
        return self.second_s / self.first_s

    @property
    def differs(self) -> bool:
        """The times differ by more than the spread of the measurements."""
        return abs(log(self.ratio)) > log(1 + self.noise)


def compare(first: Iterable[Measurement], second: Iterable[Measurement]) -> list[Pair]:
    """The operations that both sets hold, cold with cold and warm with warm; largest change first.

    Where a set holds an operation several times (other versions), its latest measurement counts.
    """
    a, b = _latest(first), _latest(second)
    pairs = [
        Pair(key[0], a[key].median_s, b[key].median_s, max(_spread(a[key]), _spread(b[key])))
        for key in a
        if key in b
    ]
    return sorted(pairs, key=lambda pair: -abs(log(pair.ratio)))


def geometric_mean_ratio(pairs: Iterable[Pair]) -> float:
    """Geometric mean of second / first."""
    return exp(fmean(log(pair.ratio) for pair in pairs))


def _latest(measurements: Iterable[Measurement]) -> dict[tuple[Op, bool], Measurement]:
    return {(m.op, m.cold): m for m in sorted(measurements, key=lambda m: m.date)}


def _spread(measurement: Measurement) -> float:
    return (measurement.high_s - measurement.low_s) / measurement.median_s
