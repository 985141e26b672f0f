"""Why a product takes the time it takes, and which sizes nearby would be better."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilefit.cost import tiles
from tilefit.cost.estimate import Estimate
from tilefit.cost.gemm import Schedule, schedule
from tilefit.cost.kernels import Kernel, select
from tilefit.cost.memory import floor_s
from tilefit.cost.model import estimate
from tilefit.cost.priced import PricedGpu, priced
from tilefit.gpus import Gpu
from tilefit.ops import Gemm
from tilefit.ops.dtypes import elements_per_access

#: Multiples worth moving to, in elements; the 16-byte multiple of the element type comes first.
_MULTIPLES = (64, 128, 256)
#: A size worth moving to is larger by at most this share.
MOST_GROWTH = 0.25


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A size nearby.

    Attributes:
        dimension: ``m``, ``n`` or ``k``.
        size: Its new value.
        estimate: The product's time with it.
        speedup: Old time over new time; above 1 the larger product is faster.
    """

    dimension: str
    size: int
    estimate: Estimate
    speedup: float


@dataclass(frozen=True, slots=True)
class GemmExplanation:
    """A product on a GPU, explained.

    Attributes:
        gemm, gpu, estimate: What was asked, and the prediction.
        floor_s: The least time physics allows.
        kernel: The kernels chosen by alignment, with the operand that decided.
        plan: How the model cuts it up: the tile, and how many blocks share each tile's contraction.
        neighbours: Larger sizes of m, n and k that would pay per unit of wanted work, fastest first.
    """

    gemm: Gemm
    gpu: PricedGpu
    estimate: Estimate
    floor_s: float
    kernel: Kernel
    plan: Schedule
    neighbours: tuple[Neighbour, ...]

    @property
    def waves(self) -> float:
        """Thread blocks, splits included, over the SMs."""
        return tiles.waves(self.plan.blocks, self.gpu.sms)

    @property
    def last_wave_fill(self) -> float:
        """Share of the last wave's SMs that have work."""
        return tiles.last_wave_fill(self.plan.blocks, self.gpu.sms)

    @property
    def tile_efficiency(self) -> float:
        """Share of the computed C that is wanted."""
        return tiles.tile_efficiency(self.gemm.m, self.gemm.n, self.plan.tile)

    @property
    def flop_per_s(self) -> float:
        """Predicted rate."""
        return self.gemm.flop / self.estimate.time_s

    @property
    def peak_share(self) -> float:
        """Predicted rate over the GPU's dense peak."""
        return self.flop_per_s / self.gpu.peak_flop_per_s(self.gemm.dtype)


def explain(gemm: Gemm, gpu: Gpu | str) -> GemmExplanation:
    """Everything the model knows about one product on a GPU.

    Raises:
        UsageError: no GPU has this name.
    """
    device = priced(gpu)
    kernel = select(gemm, device)
    plan = schedule(gemm, device, device.constants, kernel)
    predicted = estimate(gemm, device)
    floor, neighbours = floor_s(gemm, device), _neighbours(gemm, device, predicted)
    return GemmExplanation(gemm, device, predicted, floor, kernel, plan, neighbours)


def larger_sizes(size: int, dtype: str) -> list[int]:
    """Sizes worth moving to, increasing: multiples of 16 bytes and of the tiles, at most 25 % larger."""
    multiples = {tiles.round_up(size, step) for step in (elements_per_access(dtype), *_MULTIPLES)}
    return sorted(larger for larger in multiples - {size} if larger <= size * (1 + MOST_GROWTH))


def _neighbours(gemm: Gemm, gpu: PricedGpu, now: Estimate) -> tuple[Neighbour, ...]:
    """The next multiples of each dimension that are predicted to be faster than the size asked for."""
    found = [  # a slice keeps the leading dimensions of the matrix it was cut from
        (dimension, larger, estimate(replace(gemm, **{dimension: larger}), gpu))  # type: ignore[arg-type]
        for dimension in ("m", "n", "k")
        for larger in larger_sizes(getattr(gemm, dimension), gemm.dtype)
    ]
    better = [Neighbour(*each, now.time_s / each[2].time_s) for each in found if each[2].time_s < now.time_s]
    return tuple(sorted(better, key=lambda neighbour: -neighbour.speedup))
