"""Time of a matrix product: tiles, waves, splits of the contraction, memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log2
from typing import Any, NamedTuple

from tilefit.cost.analytic import estimates, from_datasheet
from tilefit.cost.constants import Constants
from tilefit.cost.constants import constants as constants_of
from tilefit.cost.estimate import Estimate
from tilefit.cost.features import ALIGNMENTS, FIXED_S, MEMORY_SHARE, Row, describes, one_hot, tiling
from tilefit.cost.kernels import SIMT, Kernel, select
from tilefit.cost.launch import counts
from tilefit.cost.memory import rate_bytes_per_s
from tilefit.cost.tiles import STAGE_BYTES, Tile, ceil_div, contraction, count
from tilefit.gpus import Gpu
from tilefit.ops import Gemm, Op, StepOp
from tilefit.ops.dtypes import HALVES, alignment_bytes, size_bytes

_LARGEST_TILE = 256 * 128
#: Bytes per clock at which a multiprocessor whose threads fetch gets what the L2 cache holds of a product:
#: fitted on the L40S, whose cache holds most. With it the A100, left out, is 8.7 % off, with the 24 of
#: streaming 9.0 (``benchmarks/public_tables.py``).
_FED_FROM_L2_PER_CLOCK_PER_SM = 9.0
#: Threads fetch half of a line for a stage of the pipeline: cuBLAS's kernels have stages of 32 and of 64
#: elements of 16 bits, and products of that depth on A100 and L40S fit the former.
_STAGE_BY_THREADS_BYTES = STAGE_BYTES // 2
#: Elements of the tiles that are in work at a time on a multiprocessor's CUDA cores. With it NeuSight's fp32
#: batched products are 7 % off in the median on a P100 (23 without), 19 on a V100 (54), 8 and 14 on A100s (18
#: and 21); on L4 and T4 it changes little (``benchmarks/public_tables.py``).
_RESIDENT = 2 * _LARGEST_TILE
#: Half-widths of the 80 % interval, as a factor minus one: fp32 on CUDA cores (NeuSight's tables), and what
#: few measurements support: misaligned products, other element types.
_SIMT_SPREAD, _UNFITTED_SPREAD = 0.5, 0.35
#: Element types whose products networks are fitted to.
_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8")
_LAYOUTS = ("TN", "NN", "NT", "TT")


class Schedule(NamedTuple):
    """The fastest way found to cut a product up.

    Attributes:
        time_s: Without the kernel's fixed time.
        math_s, memory_s: The two terms, of which the larger counts.
        tile: Output tile.
        split: Blocks that share one tile's contraction.
        blocks: Thread blocks.
    """

    time_s: float
    math_s: float
    memory_s: float
    tile: Tile
    split: int
    blocks: int

    def facts(self, kernel: Kernel, gpu: Gpu) -> dict[str, Any]:
        """What an estimate says of a kernel that runs so."""
        facts = {"kernel_family": kernel.family, "reason": kernel.reason, "tile": tuple(self.tile)}
        return {**facts, "waves": self.blocks / gpu.sms, "math_s": self.math_s, "memory_s": self.memory_s}


def schedule(
    gemm: Gemm, gpu: Gpu, constants: Constants, kernel: Kernel, traffic: Op | None = None
) -> Schedule:
    """The fastest tile and split for a product; ``min`` over them stands for the library's heuristic.

    With P the peak in FLOP/s, S the SMs, for a tile of a x b and a split s::

        blocks = ceil(m / a) * ceil(n / b) * batch * s      waves = ceil(blocks / S)
        K' = stage * ceil(k / (stage * s)) + prologue       e = efficiency * (a b / 32768) ** g
        math = waves * S * 2 a b K' / (P e)                 idle SMs of the last wave are paid for
        bytes = read + write_weight * written + 4 s m n     (the last term where s > 1)
        memory = bytes / rate / min(1, blocks / (S f))      few blocks cannot saturate the memory
        time = (math ** p + memory ** p) ** (1 / p) + price of a split

    Args:
        traffic: Whose compulsory bytes are moved; the product's own by default. The operands of an implicit
            product overlap, so a convolution moves less.
    """
    m, n, k, batch = gemm.m, gemm.n, gemm.k, gemm.batch
    sms = gpu.sms
    size = size_bytes(gemm.dtype)
    by_threads = traffic is None and kernel.is_fed
    stage = (_STAGE_BY_THREADS_BYTES if by_threads else STAGE_BYTES) // size
    prologue = constants.prologue_bytes / size
    peak = gpu.peak_flop_per_s(gemm.dtype)
    efficiency = constants.simt_efficiency if kernel.family == SIMT else constants.math_efficiency
    efficiency *= kernel.math_share
    # Of FLOP per clock and SM, as a share of the peak.
    clocks = sms * gpu.boost_clock_hz / peak
    source = traffic or gemm
    weighted = source.read_bytes + constants.write_weight * source.write_bytes
    fetched = kernel.bytes_per_clock_per_sm * sms * gpu.boost_clock_hz
    rate = min(rate_bytes_per_s(source.moved_bytes, gpu, constants), fetched)
    if traffic is None:
        if by_threads:
            constants = replace(constants, l2_bytes_per_clock_per_sm=_FED_FROM_L2_PER_CLOCK_PER_SM)
        passed_on = min(rate_bytes_per_s(source.moved_bytes, gpu, constants, passed_on=True), fetched)
        # Before B is needed again, a weight, others are.
        weighted += gemm.matrices * n * k * size * max(0.0, passed_on / rate - 1)
        rate = passed_on
    saturating = sms * constants.saturating_share
    p = constants.overlap
    best = (inf, 0.0, 0.0, kernel.tiles[0], 1, 1)
    for tile in kernel.tiles:
        a, b = tile
        cells = count(m, n, tile, batch)
        share = efficiency * min(1.0, a * b / _LARGEST_TILE) ** constants.small_tile_exponent
        wave_s = sms * 2 * a * b / (peak * min(share, clocks * kernel.ceiling(a, b, size)))
        for split in kernel.splits:
            blocks = cells * split
            waves = ceil_div(blocks, sms)
            # On CUDA cores blocks are filled while others on the multiprocessor are in work.
            others = min(waves, _RESIDENT / (a * b)) if kernel.family == SIMT else 1.0
            math_s = waves * wave_s * (contraction(k, stage, split) + prologue / max(1.0, others))
            memory_s = weighted if split == 1 else weighted + 4 * split * m * n * batch
            memory_s /= rate * min(1.0, min(blocks, sms) / saturating)
            extra_s = constants.split_s if split > 1 else 0.0
            if max(math_s, memory_s) + extra_s < best[0]:
                time_s = (math_s**p + memory_s**p) ** (1 / p) + extra_s
                if time_s < best[0]:
                    best = (time_s, math_s, memory_s, tile, split, blocks)
            if blocks > 2 * sms:
                break
    return Schedule(*best)


def _spread(gemm: Gemm, kernel: Kernel, constants: Constants) -> float:
    """Half-width of the interval: the constants' own is that of what they were fitted on."""
    as_fitted = gemm.dtype in HALVES and not kernel.misaligned
    own = constants.spread if as_fitted else max(constants.spread, _UNFITTED_SPREAD)
    return _SIMT_SPREAD if kernel.family == SIMT else own


@estimates(Gemm)
def estimate_gemm(gemm: Gemm, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted time of a product."""
    kernel = select(gemm, gpu)
    plan = schedule(gemm, gpu, constants, kernel)
    time_s = plan.time_s
    if gemm.batch > 1:  # tiles that batches alone have make none of them faster than one product
        one = replace(gemm, batch=1, same_b=False)
        time_s = max(time_s, schedule(one, gpu, constants, select(one, gpu)).time_s)
    time_s, facts = time_s + constants.kernel_s(gpu), plan.facts(kernel, gpu)
    spread = _spread(gemm, kernel, constants)
    return from_datasheet(gemm, gpu, time_s, spread, provenance=constants.provenance, **facts)


#: Products in fp32 of 33 rows or more that the library makes in two steps, of three with a bias: the longest
#: contraction, most rows, and most elements of the result; and others where a bias is added.
_IN_STEPS, _IN_STEPS_WITH_BIAS, _FEW_ROWS = (32, 4096, 1 << 17), (1024, 512, 1 << 16), 32


@counts(Gemm)
def kernels(op: Gemm, gpu: Gpu, entry: StepOp | None = None) -> int:
    """Kernels that a product takes (``benchmarks/launch_counts.py``, 6,048 on an H200).

    A split contraction is added up by another, but seldom where a bias is added, and never of a matrix times
    a vector. Where there is but one row, column or element to add up, PyTorch copies a bias into the result
    first (``isInputCompliesAddmmCudaLt`` in ATen/native/cuda/Blas.cpp).
    """
    if op.bias and min(op.m, op.n, op.k) == 1:
        return 2
    if _is_in_steps(op):
        return 2 + op.bias
    if op.bias or min(op.m, op.n) == 1:
        return 1
    return 1 + (schedule(op, gpu, constants_of(gpu), select(op, gpu)).split > 1)


def _is_in_steps(op: Gemm) -> bool:
    of_rows = op.dtype == "fp32" and op.layout[1] == "N" and op.m > _FEW_ROWS and min(op.n, op.k) > 1
    limits = (_IN_STEPS, _IN_STEPS_WITH_BIAS) if op.bias else (_IN_STEPS,)
    return of_rows and any(
        op.k <= contraction and op.m <= rows and op.m * op.n <= size for contraction, rows, size in limits
    )


@describes(Gemm(96, 264, 520, "fp16", "NN"))
def gemm_features(op: Gemm, gpu: Gpu) -> Row:
    """What the networks see of a product."""
    m, n, k, batch, dtype = op.m, op.n, op.k, op.batch, op.dtype
    size = size_bytes(dtype)
    out_dtype = op.out_dtype or {"int8": "int32", "fp8": "bf16"}.get(dtype, dtype)
    out_size = size_bytes(out_dtype)
    peak = gpu.peak_flop_per_s(dtype)
    a, b, _ = op.operands
    aligned = (a.alignment_bytes, b.alignment_bytes, alignment_bytes(n, out_dtype))
    a_bytes, b_bytes, c_bytes = batch * m * k * size, op.matrices * n * k * size, batch * m * n * out_size
    moved = a_bytes + b_bytes + c_bytes
    math_s = op.flop / peak
    memory_s = moved / gpu.memory_bandwidth_bytes_per_s
    tiled_s, tiles = tiling(op, peak, gpu)
    baseline_s = max(tiled_s, memory_s / MEMORY_SHARE) + FIXED_S
    worst = min(aligned)
    row = [
        log2(m), log2(n), log2(k), log2(batch), float(out_size), 1.0 if op.bias else 0.0,
        1.0 if op.ld_a or op.ld_b else 0.0,
        log2(math_s), log2(memory_s), log2(math_s / memory_s), log2(m * n * batch),
        log2(moved), log2(a_bytes), log2(b_bytes), log2(m / n), log2(tiled_s), log2(baseline_s),
        *(log2(each) for each in aligned), log2(worst),
    ]  # fmt: skip
    row += tiles
    row += one_hot(dtype, _DTYPES) + one_hot(op.layout, _LAYOUTS)
    for each in (*aligned, worst):
        row += one_hot(each, ALIGNMENTS)
    return baseline_s, row
