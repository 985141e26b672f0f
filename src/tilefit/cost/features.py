"""What the fitted model sees of an operation: sizes, alignments, traffic, and how tiles divide it.

For each kind a function returns a baseline in seconds, which the model corrects, and a row of numbers. The
rows hold analytic quantities (the roofline's two times, tiles, waves, quantization losses), so that a small
network is enough and that sizes it has never seen still look familiar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, log2
from typing import Any, TypeVar

from tilefit.cost.kernels import select
from tilefit.cost.kinds import ByKind
from tilefit.cost.tiles import STAGE_BYTES, ceil_div, contraction, count, round_up, waves
from tilefit.gpus import Gpu
from tilefit.ops import Conv, Gemm, Op
from tilefit.ops.dtypes import size_bytes

#: Tiles whose quantization is described; a subset spans what the libraries use.
_TILES = (
    (32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (192, 192), (64, 256),
    (256, 64), (32, 128), (128, 32),
)  # fmt: skip
#: Bytes of alignment that there are.
ALIGNMENTS = tuple(2**power for power in range(8))
#: Shares of the peak and of the bandwidth that large operations reach, and the time of the shortest kernel:
#: they only centre the baseline, the fit corrects it.
MATH_SHARE = 0.84
MEMORY_SHARE = 0.85
FIXED_S = 2.2e-6
_PROLOGUE_BYTES = 256
#: Splits of the contraction that are looked at, and what adding the parts up takes beside their traffic.
_MOST_SPLITS = 512
_SPLIT_S = 1.5e-6
#: A narrow product is described by fewer waves than this, without the loss of the last one.
_LEAST_WAVES = 0.2

Row = tuple[float, list[float]]
_F = TypeVar("_F", bound=Callable[..., Any])

#: ``(op, gpu) -> Row`` of each kind that networks are fitted for.
features = ByKind()
_EXAMPLES: dict[str, Op] = {}


def describes(example: Op) -> Callable[[_F], _F]:
    """Registers the features of a kind, with an operation of it for :func:`example`."""
    _EXAMPLES[example.kind] = example
    return features(type(example))


def example(kind: str) -> Op:
    """An operation by which one can tell whether networks of a kind still see what they were fitted to."""
    features[Op.KINDS[kind]]
    return _EXAMPLES[kind]


def domain(op: Op) -> str:
    """What must have been measured for the fitted model to speak: the element type, or the role."""
    return op.dtype if op.multiplies else op.category


def apart(op: Op, gpu: Gpu) -> str:
    """Operations whose times networks miss by more, or less, than those of the rest of their kind."""
    if isinstance(op, Gemm):
        return "misaligned" if select(op, gpu).misaligned else ""
    return "" if not isinstance(op, Conv) or op.groups == 1 else "depthwise" if op.is_depthwise else "groups"


def one_hot(value: object, values: Iterable[object]) -> list[float]:
    """1 where it is the value."""
    return [1.0 if value == each else 0.0 for each in values]


def quantization(tiles: int, sms: int) -> list[float]:
    """Waves of tiles over the SMs, and what the last one loses."""
    share = waves(tiles, sms)
    return [log2(share), ceil_div(tiles, sms) / share if share > _LEAST_WAVES else 0.0]


def tiling(gemm: Gemm, peak: float, gpu: Gpu) -> Row:
    """The best time of a product over the tiles, and how each divides it over the SMs."""
    row: list[float] = []
    best = float("inf")
    size = size_bytes(gemm.dtype)
    depth = contraction(gemm.k, STAGE_BYTES // size) + _PROLOGUE_BYTES / size
    for tile in _TILES:
        a, b = tile
        blocks = count(gemm.m, gemm.n, tile, gemm.batch)
        row += (*quantization(blocks, gpu.sms), log2(blocks * a * b / (gemm.m * gemm.n * gemm.batch)))
        best = min(best, ceil_div(blocks, gpu.sms) * gpu.sms * 2 * a * b * depth / (peak * MATH_SHARE))
    return best, row


def best_split(product: Gemm, gpu: Gpu, tile: int) -> tuple[float, int]:
    """The best time of a product in square tiles over the splits of its contraction, and that split."""
    blocks = count(product.m, product.n, (tile, tile), product.batch)
    stage = STAGE_BYTES // size_bytes(product.dtype)
    stages = ceil_div(product.k, stage)
    peak = gpu.peak_flop_per_s(product.dtype)
    wave_s = gpu.sms * 2 * tile * tile * stage / (peak * MATH_SHARE)
    added_s = product.m * product.n * product.batch * 2 / gpu.memory_bandwidth_bytes_per_s
    best, best_at, split = inf, 1, 1
    while split <= max(1, min(_MOST_SPLITS, stages // 2)):
        time_s = ceil_div(blocks * split, gpu.sms) * (ceil_div(stages, split) + 3) * wave_s
        if split > 1:
            time_s += _SPLIT_S + added_s * (split + 1)
        if time_s < best:
            best, best_at = time_s, split
        split *= 2
    return best, best_at


def divided(op: Op, gpu: Gpu) -> list[float]:
    """How few rows and columns a product has, what whole steps of its contraction lose, and for square tiles
    the best time over the splits of the contraction, and that split."""
    assert isinstance(op, Gemm)
    m, n, k = op.m, op.n, op.k
    row = [min(m, 32), min(n, 32), min(k, 64), log2(min(m, n)), log2(max(m, n))]
    row += [log2(round_up(k, step) / k) for step in (16, 32, 64, 128)]
    return row + [log2(each) for tile in (16, 32, 64, 128) for each in best_split(op, gpu, tile)]
