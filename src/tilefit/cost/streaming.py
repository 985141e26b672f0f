"""Time of operations that stream memory."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from math import gcd, log2, prod
from typing import NamedTuple

from tilefit.cost.analytic import estimates, from_datasheet
from tilefit.cost.constants import Constants
from tilefit.cost.estimate import MATH, Estimate
from tilefit.cost.features import FIXED_S, MEMORY_SHARE, Row, describes, one_hot
from tilefit.cost.launch import COMPILED_KERNEL_S, counts, launches
from tilefit.cost.memory import clocks_s, floor_s, moved_s
from tilefit.cost.sums import SUMMED, summed_s
from tilefit.cost.tables import DATA, toml
from tilefit.gpus import Gpu
from tilefit.ops import Op, StepOp, Streaming
from tilefit.ops.dtypes import LINE_BYTES, size_bytes
from tilefit.ops.streaming import JOINED_ALONE, ROLES

#: ``Streaming.function`` of a kernel that the compiler wrote, and of one that applies the given statistics of
#: a batch norm.
GENERATED = "generated"
APPLIED = "batch_norm_elemt"

LIMITS = DATA / "streaming.csv"
#: What is known of functions by their names, by table; with the sources.
BY_FUNCTION = toml("functions")


class Limits(NamedTuple):
    """What limits the kernels of a function, whatever the GPU.

    Attributes:
        share: Of the reachable bandwidth.
        bytes_per_clock: What a multiprocessor moves of the rows that are reduced together, of which there may
            be fewer than multiprocessors; 0 where one row is spread over several.
        clocks_per_row: What a multiprocessor takes for a row at least.
        kernels: Fixed time of a kernel, over that of a product's.
    """

    share: float
    bytes_per_clock: float = 0.0
    clocks_per_row: float = 0.0
    kernels: float = 1.0


#: Functions that were measured, and kernels of those that launch several.
FUNCTIONS = tuple(BY_FUNCTION["measured"].split())
_KERNELS = {name: int(number) for number, names in BY_FUNCTION["kernels"].items() for name in names.split()}
_BY_ROLE = {role: Limits(**facts) for role, facts in BY_FUNCTION["roles"].items()}
_DTYPES = ("bf16", "fp16", "fp32")
#: Numbers up to which a single kernel sorts them.
TILE_SORTED = 3072
#: Rows and elements that one block of a reduction takes, about.
_BLOCK = 1024


def traffic(op: Op) -> Op:
    """An operation that does nothing but move its bytes, of one that is priced by these and its work: a
    kernel that a compiler wrote, or one that applies given statistics. One that was not measured as a whole
    is so many kernels."""
    if not isinstance(op, Streaming):
        return op
    if op.function in _KERNELS and op.function not in FUNCTIONS and op.role != "optimizer":
        return replace(op, kernels=op.kernels - 1 + _KERNELS[op.function])
    if op.function == GENERATED:
        return replace(op, flop_per_element=0.0)
    if op.function == APPLIED:
        return replace(op, role="pointwise", strided=False)
    if op.function in ("cat", JOINED_ALONE, SUMMED):
        return replace(op, strided=False, function=op.function.removesuffix("_alone"))
    return op


def with_work(op: Op, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of an operation, from that of its :func:`traffic`: what it computes comes on top."""
    if not isinstance(op, Streaming):
        return estimate
    if op.function == SUMMED:
        floor = floor_s(op, gpu)
        return estimate.within(max(summed_s(op, gpu), floor), BY_FUNCTION["spreads"][SUMMED], floor)
    if op.function in BY_FUNCTION["fresh"]["clocks"]:
        return _of_fresh_tensors(op, estimate, gpu)
    if op.function in BY_FUNCTION["long_rows"]["again"]:
        return _of_long_rows(op, estimate, gpu)
    math_s, power, before_s = _work(op, gpu)
    if not math_s:
        return estimate
    limit = MATH if math_s > estimate.time_s else estimate.bound
    both = lambda time_s: before_s + (time_s**power + math_s**power) ** (1 / power)  # noqa: E731
    return estimate.each(both, math_s=math_s, bound=limit)


def _math_s(op: Streaming, gpu: Gpu) -> float:
    """Arithmetic runs on the fp32 pipelines whatever the element type, but for fp64."""
    return op.flop / gpu.peak_flop_per_s("fp64" if op.dtype == "fp64" else "fp32")


def _work(op: Streaming, gpu: Gpu) -> tuple[float, float, float]:
    """Seconds that a kernel computes, the power with which these and those of its traffic add, and seconds of
    what comes before."""
    if op.function == GENERATED:
        return _math_s(op, gpu), 1.0, 0.0
    by_name = BY_FUNCTION["work"]
    known = by_name.get(f"{op.function} {op.dtype}") or by_name.get(op.function, {})
    time_s = op.inner * known.get("step_clocks", 0.0) / gpu.boost_clock_hz
    if op.read_bytes != op.write_bytes or "upsample" not in op.function:
        time_s += clocks_s(op.elements, gpu) * known.get("element_clocks", (0.0, 0.0))[op.strided]
    return time_s, known.get("power", 1.0), known.get("before_s", 0.0)


def _of_fresh_tensors(op: Streaming, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of tensors that come from memory, or of such as fit into the L2 cache and are in it."""
    fresh = BY_FUNCTION["fresh"]
    if op.moved_bytes * fresh["footprint"] > gpu.l2_bytes:
        return estimate
    blocks = op.elements / fresh["chunk_elements"]
    rounds = max(min(1.0, blocks), blocks / gpu.sms)
    chunk_s = fresh["chunk_elements"] * fresh["clocks"][op.function] / gpu.boost_clock_hz
    time_s = max(op.kernels * fresh["kernel_s"] + rounds * chunk_s, floor_s(op, gpu))
    if time_s >= estimate.time_s:
        return estimate
    share = time_s / estimate.time_s
    return replace(estimate, time_s=time_s, low_s=estimate.low_s * share, high_s=estimate.high_s)


def _of_long_rows(op: Streaming, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of a softmax, or what its bytes take that are read again since the L2 cache, too, has not
    kept the rows that blocks work on."""
    long, row_bytes = BY_FUNCTION["long_rows"], op.inner * size_bytes(op.dtype)
    if row_bytes <= long["block_memory_bytes"]:
        return estimate
    rows = op.elements / op.inner
    fill = min(rows, long["blocks_per_sm"] * gpu.sms) * row_bytes / (long["l2_share"] * gpu.l2_bytes)
    again = long["again"][op.function] * rows * row_bytes * (1 - 1 / (1 + fill**4))
    time_s = (op.moved_bytes + again) / (gpu.memory_bandwidth_bytes_per_s * MEMORY_SHARE)
    scale = max(1.0, time_s / estimate.time_s)
    return estimate.each(lambda each_s: each_s * scale)


def busy_s(op: Streaming, gpu: Gpu, constants: Constants, limits: Limits) -> float:
    """Time that an operation keeps the memory busy, or the multiprocessors that its rows occupy."""
    moved = op.moved_bytes
    time_s = moved_s(moved, gpu, constants) / limits.share
    if not op.inner:
        return time_s
    rows = max(1.0, op.elements / op.inner)
    if limits.bytes_per_clock:
        time_s = max(time_s, moved / (min(rows, gpu.sms) * gpu.boost_clock_hz * limits.bytes_per_clock))
    return max(time_s, clocks_s(rows * limits.clocks_per_row, gpu))


@cache
def _limits() -> dict[tuple[str, bool], Limits]:
    """Those fitted to an H200's profile (``benchmarks/fit_streaming.py``), by function and strided or not."""
    with LIMITS.open(newline="") as file:
        _, *rows = csv.reader(file)
    return {(name, strided == "1"): Limits(*map(float, each)) for name, strided, *each in rows}


@estimates(Streaming)
def estimate_streaming(op: Streaming, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted time of a streaming operation: bytes at the rate they reach, plus the kernels' fixed time."""
    limits = _limits().get((op.function, op.strided)) or _BY_ROLE[op.role]
    if op.strided and (op.function, True) not in _limits():
        limits = limits._replace(share=limits.share / 2)  # not coalesced on one side
    math_s = _math_s(op, gpu)
    longer_s = max(busy_s(op, gpu, constants, limits), math_s)
    time_s = longer_s + op.kernels * constants.kernel_s(gpu) * limits.kernels
    memory_s, spread = moved_s(op.moved_bytes, gpu, constants), BY_FUNCTION["spreads"][op.role]
    parts = {"math_s": math_s, "memory_s": memory_s, "busy_s": longer_s}
    reason = f"{op.role}: moves {op.moved_bytes} bytes" + (", strided" if op.strided else "")
    return from_datasheet(op, gpu, time_s, spread, **parts, kernel_family="streaming", reason=reason)


@launches(Streaming)
def launch_streaming(op: Streaming, phase: str, gpu: Gpu, compiled: bool) -> tuple[int, float | None]:
    """The compiler generates the kernels, and what launches them."""
    return op.kernels, COMPILED_KERNEL_S * op.kernels if op.function == GENERATED else None


@counts(Streaming)
def count_streaming(op: Streaming, gpu: Gpu, entry: StepOp) -> int:
    """The kernels of a function's implementation for CUDA."""
    if op.function.endswith("index_put") and op.kernels > 1:
        indices = sum(ref.dtype.startswith("int") for ref in entry.inputs)
        return 9 * indices + (3 if prod(entry.inputs[-1].shape) <= TILE_SORTED else 6)
    norm = op.function.startswith("native_batch_norm")
    pixels = prod(entry.inputs[0].shape[2:]) if norm and entry.inputs else 2
    if op.function == "native_batch_norm" and (pixels == 1 or (op.dtype == "bf16" and not op.strided)):
        return 3  # cuDNN takes none of these: statistics, their running mean, and what applies them
    if op.function == "native_batch_norm_backward" and pixels == 1:
        return 2
    if op.function == "embedding_dense_backward":
        return 21 if op.kernels > 2 else op.kernels  # those of a sort
    return op.kernels - 1 + _KERNELS.get(op.function, 1)


@describes(Streaming("softmax", 96_000, 192_000, 192_000, dtype="fp16", inner=960))
def streaming_features(op: Streaming, gpu: Gpu) -> Row:
    """What the networks see: its traffic, and how it is cut into rows."""
    moved = max(1, op.moved_bytes)
    memory_s = moved / gpu.memory_bandwidth_bytes_per_s
    baseline_s = memory_s / MEMORY_SHARE + op.kernels * FIXED_S
    elements = max(1, op.elements)
    inner = op.inner or 1
    outer = max(1.0, elements / inner)
    size = size_bytes(op.dtype)
    row = [
        log2(elements), log2(1 + op.read_bytes), log2(1 + op.write_bytes), log2(moved), log2(memory_s),
        log2(baseline_s), op.read_bytes / (elements * size), op.write_bytes / (elements * size),
        log2((1 + op.read_bytes) / (1 + op.write_bytes)), log2(inner), log2(outer), float(op.inner > 0),
        log2(outer / gpu.sms), log2(gcd(inner * size, LINE_BYTES)), log2(gcd(elements * size, LINE_BYTES)),
        log2(elements / _BLOCK / gpu.sms), log2(max(1.0, inner / _BLOCK)), log2(moved / gpu.l2_bytes),
        float(moved > gpu.l2_bytes), float(op.strided), log2(op.kernels), float(op.kernels > 1), float(size),
        log2(max(1.0, outer / gpu.sms)), float(inner * size % 16 == 0), float(elements * size % 16 == 0),
    ]  # fmt: skip
    row += one_hot(op.role, ROLES) + one_hot(op.dtype, _DTYPES)
    row += one_hot(op.function, FUNCTIONS)
    return baseline_s, row
