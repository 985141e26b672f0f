"""Time and rate of products, or of a whole step, while one size varies: the knee, the dips, where to move."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tilefit.cost.estimate import Estimate
from tilefit.cost.explain import MOST_GROWTH, larger_sizes
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import PricedGpu, priced
from tilefit.cost.step import estimate_step
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, Gemm, Op, Step
from tilefit.ops.base import DIRECTIONS
from tilefit.ops.gemm import linear_pass
from tilefit.units import capacity

#: The knee: the smallest size that reaches this share of the best rate.
KNEE_SHARE = 0.95
#: A dip, or a fall of the rate, is at least this large; less is within the model's noise.
LEAST_GAIN = 0.05
#: Of the larger sizes, the smallest within this share of the fastest is the one to move to.
_TIE = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    """One size.

    Attributes:
        size: The size that varies.
        time_s, low_s, high_s: Time and its interval: of a prediction the 80 % interval, of a measurement the
            20th and 80th percentile; of several products their sums.
        flop: Floating-point operations; of a step those of :attr:`~tilefit.ops.Step.tensor_flop`.
        kernel_families: What the library would run, each once; empty for a step.
        items: Samples or tokens that a step processes (:attr:`Curve.unit`); 0 for products.
        memory_bytes: The most memory that a step holds at once; 0 for products.
    """

    size: int
    time_s: float
    low_s: float
    high_s: float
    flop: int
    kernel_families: tuple[str, ...] = ()
    items: int = 0
    memory_bytes: int = 0

    @property
    def flop_per_s(self) -> float:
        """Floating-point operations per second."""
        return self.flop / self.time_s

    @property
    def items_per_s(self) -> float:
        """Samples or tokens per second."""
        return self.items / self.time_s


@dataclass(frozen=True, slots=True)
class Dip:
    """Sizes that are slower than one larger size nearby.

    Attributes:
        points: The slow ones, in order.
        better: The next efficient size: the smallest within 2 % of the fastest at most 25 % larger.
    """

    points: tuple[Point, ...]
    better: Point

    @property
    def worst(self) -> Point:
        """The slowest of them."""
        return max(self.points, key=lambda point: point.time_s)

    @property
    def speedup(self) -> float:
        """Time of the slowest over that of the better size."""
        return self.worst.time_s / self.better.time_s


@dataclass(frozen=True, slots=True)
class Curve:
    """What was predicted, or measured, over a range of sizes.

    Attributes:
        name: What varies between curves of one range: the layout, or the pass.
        gpu: The GPU.
        points: By increasing size.
        dips: Slow sizes with where to move.
        provenance: What the times rest on, as of :class:`~tilefit.cost.Estimate`.
        unit: What a step's :attr:`Point.items` are: ``samples`` or ``tokens``; empty where unknown.
        too_large: Sizes left out because the GPU's memory does not hold the step.
    """

    name: str
    gpu: PricedGpu
    points: tuple[Point, ...]
    dips: tuple[Dip, ...]
    provenance: str
    unit: str = ""
    too_large: tuple[int, ...] = ()

    @property
    def best(self) -> Point:
        """The point of the highest rate."""
        return max(self.points, key=lambda point: point.flop_per_s)

    @property
    def steps(self) -> tuple[Point, ...]:
        """Points after which the rate falls, but not into a dip: more would start another tile or wave."""
        slow = {point for dip in self.dips for point in dip.points}
        return tuple(
            point
            for point, following in pairwise(self.points)
            if following not in slow and following.flop_per_s < (1 - LEAST_GAIN) * point.flop_per_s
        )

    @property
    def knee(self) -> Point | None:
        """The smallest size at 95 % of the best rate.

        None where the range is too narrow to hold it, or ends while the rate still rises.
        """
        first, last = self.points[0].size, self.points[-1].size
        size = knee({point.size: point.flop_per_s for point in self.points})
        if last < 2 * first or size * (1 + MOST_GROWTH) > last:
            return None
        return next(point for point in self.points if point.size == size)


def knee(rates: Mapping[int, float]) -> int:
    """The smallest size whose rate is within 5 % of the best."""
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= KNEE_SHARE * best)


def linear(rows: int, in_features: int, out_features: int, dtype: str, *, train: bool) -> tuple[Gemm, ...]:
    """The products of ``F.linear`` on rows of features: forward, data gradient, weight gradient."""
    passes = DIRECTIONS if train else (FORWARD,)
    return tuple(linear_pass(each, rows, out_features, in_features, dtype) for each in passes)


#: Times of operations on a GPU, as :func:`~tilefit.cost.model.estimate_all` gives them.
Prices = Callable[[Iterable[Op], Gpu], Sequence[Estimate]]


def curve(
    name: str,
    products: Callable[[int], Sequence[Gemm]],
    sizes: Sequence[int],
    gpu: Gpu,
    prices: Prices | None = None,
) -> Curve:
    """The products of each size, one after the other, and the sizes that a larger one beats.

    Args:
        name: What to call the curve.
        products: The products to run at a size.
        sizes: The sizes to look at, increasing. Where to move is also sought among the multiples between and
            just beyond them, if times are predicted.
        gpu: The GPU.
        prices: Measured times; predicted ones if None.
    """
    gpu = priced(gpu)
    ordered = sizes if prices else _with_larger(sizes, products(sizes[0])[0].dtype)
    together = [products(size) for size in ordered]
    estimates = iter((prices or estimate_all)([product for each in together for product in each], gpu))
    found = {}
    for size, each in zip(ordered, together, strict=True):
        times = [next(estimates) for _ in each]
        time_s, low_s, high_s = map(sum, zip(*((p.time_s, p.low_s, p.high_s) for p in times), strict=True))
        families = tuple(dict.fromkeys(time.kernel_family for time in times if time.kernel_family))
        flop = sum(product.flop for product in each)
        found[size] = Point(size, time_s, low_s, high_s, flop, families)
    return _curve(name, gpu, sizes, found, times[0].provenance)


def step_curve(
    name: str,
    step_at: Callable[[int], Step],
    sizes: Sequence[int],
    gpu: Gpu,
    *,
    over: str,
    everywhere: bool,
    prices: Prices | None = None,
) -> Curve:
    """A whole step at each size, and the sizes that a larger one beats.

    Args:
        name: What to call the curve.
        step_at: The step at a size.
        sizes: The sizes to look at, increasing.
        gpu: The GPU.
        over: Which size varies; over ``seq`` tokens are counted, otherwise samples.
        everywhere: Whether ``step_at`` knows sizes beyond those given, so that where to move may be sought
            among them.
        prices: Measured times of the operations; predicted ones if None.

    Raises:
        TilefitError: the GPU's memory does not hold the step at any of the sizes.
    """
    gpu = priced(gpu)
    first = step_at(sizes[0])
    dtype = first.settings.amp or "fp32"
    found: dict[int, Point] = {}
    too_large: dict[int, int] = {}
    for size in _with_larger(sizes, dtype) if everywhere and not prices else sizes:
        step = step_at(size)
        if step.memory.peak_bytes > gpu.memory_bytes:
            too_large[size] = step.memory.peak_bytes
            continue
        total = estimate_step(step, gpu, (prices or estimate_all)([entry.op for entry in step.ops], gpu))
        items = step.batch * (size if over == "seq" else 1)
        ends = total.time_s, total.low_s, total.high_s
        found[size] = Point(size, *ends, step.tensor_flop, (), items, step.memory.peak_bytes)
    if not any(size in found for size in sizes):
        raise TilefitError(
            f"at {over} {sizes[0]} the step needs {capacity(too_large[sizes[0]])}, and {gpu.title} has "
            f"{capacity(gpu.memory_bytes)}",
            hint="Begin with a smaller size, or name a larger GPU.",
        )
    unit = ("tokens" if over == "seq" else "samples") if first.batch else ""
    without = tuple(size for size in sizes if size in too_large)
    return _curve(name, gpu, sizes, found, total.provenance, unit, without)


def _curve(name: str, gpu: PricedGpu, sizes: Sequence[int], found: Mapping[int, Point], *facts: Any) -> Curve:
    """The points of some sizes, and which of all those found beat them."""
    points = tuple(found[size] for size in sizes if size in found)
    return Curve(name, gpu, points, _dips(points, list(found.values())), *facts)


def _with_larger(sizes: Sequence[int], dtype: str) -> list[int]:
    """The sizes, and those worth moving to from any of them."""
    return sorted({larger for size in sizes for larger in larger_sizes(size, dtype)}.union(sizes))


def _dips(points: Sequence[Point], candidates: Sequence[Point]) -> tuple[Dip, ...]:
    """The points that a larger size beats, those with the same better size together."""
    slow: dict[Point, list[Point]] = {}
    for point in points:
        if better := _better(point, candidates):
            slow.setdefault(better, []).append(point)
    return tuple(Dip(tuple(beaten), better) for better, beaten in slow.items())


def _better(point: Point, candidates: Sequence[Point]) -> Point | None:
    """The smallest of the larger sizes that take about the least time, where that is worth it."""
    start = bisect_right(candidates, point.size, key=lambda each: each.size)
    end = bisect_right(candidates, point.size * (1 + MOST_GROWTH), key=lambda each: each.size)
    larger = candidates[start:end]
    if not larger:
        return None
    least_s = min(each.time_s for each in larger)
    if least_s > (1 - LEAST_GAIN) * point.time_s:
        return None
    return next(each for each in larger if each.time_s <= (1 + _TIE) * least_s)
