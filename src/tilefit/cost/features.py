"""What the fitted model sees of an operation: sizes, alignments, traffic, and how tiles divide it.

Each function returns a baseline in seconds, which the model corrects, and a row of numbers. The rows hold
analytic quantities (the roofline's two times, tiles, waves, quantization losses), so that a small network is
enough and that sizes it has never seen still look familiar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, gcd, log2, prod

from tilefit.cost.attention import backend
from tilefit.cost.tiles import ceil_div
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_WEIGHT, FORWARD, Attention, Conv, Gemm, Op, Streaming
from tilefit.ops.dtypes import LINE_BYTES, elements_per_access, size_bytes
from tilefit.ops.streaming import ROLES

#: Tiles whose quantization is described; a subset spans what the libraries use.
_TILES = (
    (32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (192, 192), (64, 256),
    (256, 64), (32, 128), (128, 32),
)  # fmt: skip
_GEMM_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8")
_LAYOUTS = ("TN", "NN", "NT", "TT")
_ALIGNMENTS = tuple(2**power for power in range(8))
#: Shares of the peak and of the bandwidth that large operations reach, and the time of the shortest kernel:
#: they only centre the baseline, the fit corrects it.
_MATH_SHARE = 0.84
_MEMORY_SHARE = 0.85
_FIXED_S = 2.2e-6
_PROLOGUE_BYTES = 256
_STAGE_BYTES = 128
#: A narrow product is described by fewer waves than this, without the loss of the last one.
_LEAST_WAVES = 0.2

Row = tuple[float, list[float]]


def _one_hot(value: object, values: Iterable[object]) -> list[float]:
    return [1.0 if value == each else 0.0 for each in values]


def _log2(value: float) -> float:
    return log2(max(value, 1e-12))


def _tiling(m: int, n: int, k: int, batch: int, size: int, peak: float, gpu: Gpu) -> Row:
    """The best time over the tiles, and how each divides the product over the SMs."""
    row: list[float] = []
    best = float("inf")
    wanted = m * n * batch
    depth = (ceil_div(k * size, _STAGE_BYTES) * _STAGE_BYTES + _PROLOGUE_BYTES) / size
    for a, b in _TILES:
        blocks = ceil_div(m, a) * ceil_div(n, b) * batch
        waves = blocks / gpu.sms
        whole = ceil(waves)
        row += (
            log2(waves),
            whole / waves if waves > _LEAST_WAVES else 0.0,
            log2(blocks * a * b / wanted),
        )
        best = min(best, whole * gpu.sms * 2 * a * b * depth / (peak * _MATH_SHARE))
    return best, row


def gemm(op: Gemm, gpu: Gpu) -> Row:
    """A matrix product."""
    m, n, k, batch, dtype = op.m, op.n, op.k, op.batch, op.dtype
    size = size_bytes(dtype)
    out_size = size_bytes(op.out_dtype or {"int8": "int32", "fp8": "bf16"}.get(dtype, dtype))
    peak = gpu.peak_flop_per_s(dtype)
    layout = op.layout
    ld_a = op.ld_a or (k if layout[1] == "N" else m)
    ld_b = op.ld_b or (n if layout[0] == "N" else k)
    aligned = (
        gcd(ld_a * size, LINE_BYTES), gcd(ld_b * size, LINE_BYTES), gcd(n * out_size, LINE_BYTES)
    )  # fmt: skip
    a_bytes, b_bytes, c_bytes = batch * m * k * size, batch * n * k * size, batch * m * n * out_size
    moved = a_bytes + b_bytes + c_bytes
    math_s = op.flop / peak
    memory_s = moved / gpu.memory_bandwidth_bytes_per_s
    tiled_s, tiling = _tiling(m, n, k, batch, size, peak, gpu)
    baseline_s = max(tiled_s, memory_s / _MEMORY_SHARE) + _FIXED_S
    worst = min(aligned)
    row = [
        log2(m), log2(n), log2(k), log2(batch), float(out_size), 1.0 if op.bias else 0.0,
        1.0 if op.ld_a or op.ld_b else 0.0,
        log2(math_s), log2(memory_s), log2(math_s / memory_s), log2(m * n * batch),
        log2(moved), log2(a_bytes), log2(b_bytes), log2(m / n), log2(tiled_s), log2(baseline_s),
        *(log2(each) for each in aligned), log2(worst),
    ]  # fmt: skip
    row += tiling
    row += _one_hot(dtype, _GEMM_DTYPES) + _one_hot(layout, _LAYOUTS)
    for each in (*aligned, worst):
        row += _one_hot(each, _ALIGNMENTS)
    return baseline_s, row


#: By the class of the operation.
FEATURES: dict[type[Op], Callable[..., Row]] = {Gemm: gemm}


def domain(op: Op) -> str:
    """What must have been measured for the fitted model to speak: the role, or the element type."""
    return op.role if isinstance(op, Streaming) else op.dtype
