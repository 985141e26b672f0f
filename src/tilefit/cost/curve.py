"""Time and rate of products while one size varies: the knee, the dips, the next efficient size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilefit.cost.explain import MOST_GROWTH, larger_sizes
from tilefit.cost.model import estimate_all
from tilefit.errors import UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Gemm

#: The knee: the smallest size that reaches this share of the best rate.
KNEE_SHARE = 0.95
#: A dip takes at least this share longer than a larger size nearby; less is within the model's noise.
LEAST_GAIN = 0.05
#: Of the larger sizes, the smallest within this share of the fastest is the one to move to.
_TIE = 0.02
#: Sizes of a range are sampled evenly when there are more, and this densely per doubling at least.
_MOST_SIZES = 512
_PER_DOUBLING = 64


@dataclass(frozen=True, slots=True)
class Point:
    """One size.

    Attributes:
        size: The size that varies.
        time_s, low_s, high_s: Predicted time and its 80 % interval; of several products their sums.
        flop: Floating-point operations.
        kernel_families: What the library would run, each once.
    """

    size: int
    time_s: float
    low_s: float
    high_s: float
    flop: int
    kernel_families: tuple[str, ...]

    @property
    def flop_per_s(self) -> float:
        """Predicted rate."""
        return self.flop / self.time_s


@dataclass(frozen=True, slots=True)
class Dip:
    """Consecutive sizes that are slower than one larger size.

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
    """What was predicted over a range of sizes.

    Attributes:
        name: What varies between curves of one range: the layout, or the pass.
        gpu: The GPU.
        points: By increasing size.
        dips: Slow sizes with where to move, by increasing size.
        provenance: What the times rest on, as of :class:`~tilefit.cost.Estimate`.
    """

    name: str
    gpu: Gpu
    points: tuple[Point, ...]
    dips: tuple[Dip, ...]
    provenance: str

    @property
    def best(self) -> Point:
        """The point of the highest rate."""
        return max(self.points, key=lambda point: point.flop_per_s)

    @property
    def knee(self) -> Point | None:
        """The smallest size at 95 % of the best rate; None where the range is too narrow to hold a knee."""
        if self.points[-1].size < 2 * self.points[0].size:
            return None
        size = knee({point.size: point.flop_per_s for point in self.points})
        return next(point for point in self.points if point.size == size)


def knee(rates: Mapping[int, float]) -> int:
    """The smallest size whose rate is within 5 % of the best."""
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= KNEE_SHARE * best)


def sizes_between(first: int, last: int, step: int | None = None) -> tuple[int, ...]:
    """The sizes of a range to look at: the first, and the multiples of a step up to the last.

    Without a step all of them where they are few; else multiples of a power of two that grows with the size,
    so that a range over many doublings shows each of them.

    Raises:
        UsageError: the range is empty.
    """
    if last < first:
        raise UsageError(
            f"the range {first}:{last} is reversed", hint=f"Write the smaller size first: {last}:{first}."
        )
    if step is not None:
        return (first, *range((first // step + 1) * step, last + 1, step))
    widest = 1 << ((last - first) // _MOST_SIZES).bit_length()
    sizes = [first]
    while True:
        densest = (1 << sizes[-1].bit_length() - 1) // _PER_DOUBLING
        stride = max(1, min(widest, densest))
        size = (sizes[-1] // stride + 1) * stride
        if size > last:
            return tuple(sizes)
        sizes.append(size)


def gemm_curve(product: Gemm, over: str, sizes: Sequence[int], gpu: Gpu) -> Curve:
    """A product while ``m``, ``n``, ``k`` or ``batch`` varies."""
    return _curve(
        product.layout,
        lambda size: (replace(product, **{over: size}),),  # type: ignore[arg-type]
        product.dtype,
        sizes,
        gpu,
    )


def linear_curve(
    name: str, layer: Callable[[int], tuple[Gemm, ...]], dtype: str, sizes: Sequence[int], gpu: Gpu
) -> Curve:
    """A linear layer: the products of :func:`linear` at each size, one after the other."""
    return _curve(name, layer, dtype, sizes, gpu)


def linear(rows: int, in_features: int, out_features: int, dtype: str, *, train: bool) -> tuple[Gemm, ...]:
    """The products of ``F.linear`` on rows of features: forward, data gradient, weight gradient."""
    forward = Gemm(rows, out_features, in_features, dtype, "TN")
    if not train:
        return (forward,)
    return (
        forward,
        Gemm(rows, in_features, out_features, dtype, "NN"),
        Gemm(out_features, in_features, rows, dtype, "NT"),
    )
