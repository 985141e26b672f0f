"""Rows of a table that are looked up, written or added to by their numbers: what that takes beside the bytes.

A lookup launches a block for each row. What is added to rows that may be the same is sorted first
(``index_put`` with ``accumulate``, the gradient of an embedding), or added element by element
(``index_add``). The constants (``data/functions.toml``) are those of the kernels on an H200
(``benchmarks/row_access.py``: 500 to a million random rows of 1 to 1,024 elements in tables of 200 to a
million), in clocks of a multiprocessor where they grow with the rows. Of the same sizes on an H100, of which
nothing is fitted, the median error is 6 to 10 %.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import exp, sqrt
from types import SimpleNamespace
from typing import Any, NamedTuple

from tilefit.cost.estimate import LATENCY, MEMORY, Estimate
from tilefit.cost.memory import clocks_s, floor_s, moved_s
from tilefit.cost.priced import PricedGpu
from tilefit.cost.streaming import BY_FUNCTION, TILE_SORTED
from tilefit.ops import Op, Streaming
from tilefit.ops.dtypes import HALVES, size_bytes

#: Half-width of the 80 % interval, as a factor minus one.
_SPREAD = 0.4


class _Limits(NamedTuple):
    """What the kernels of a function take, one after another: all of it adds but the last two, which overlap.

    Attributes:
        fixed_s: In any case, and for what is sorted.
        moved_bytes: Cleared, copied or read before.
        clocks: Of a multiprocessor, shared by all of them.
        waits_s: What waits for what is before it in the same row, or for the memory.
    """

    fixed_s: float = 0.0
    moved_bytes: float = 0.0
    clocks: float = 0.0
    waits_s: float = 0.0


def with_rows(op: Op, estimate: Estimate, gpu: PricedGpu) -> Estimate:
    """The estimate of an operation, or what its kernels take for rows of a table."""
    if not isinstance(op, Streaming) or not op.picked or op.function not in _LIMITS:
        return estimate
    limits = _LIMITS[op.function](op, gpu)
    time_s = limits.fixed_s + max(clocks_s(limits.clocks, gpu), limits.waits_s)
    time_s += moved_s(limits.moved_bytes, gpu, gpu.constants)
    if op.function in _LOOKUPS and time_s <= estimate.time_s:
        return estimate
    floor = floor_s(op, gpu)
    time_s = max(time_s, floor)
    limit = MEMORY if estimate.memory_s > time_s / 2 else LATENCY
    reason = f"{op.picked} rows of a table of {op.table}"
    return estimate.within(time_s, _SPREAD, floor, bound=limit, kernel_family="rows", reason=reason)


def _looked_up(op: Streaming, gpu: PricedGpu, known: Any) -> _Limits:
    row_bytes = op.inner * size_bytes(op.dtype)
    blocks = op.picked * -(-row_bytes // known.block_bytes)
    return _Limits() if row_bytes % 16 else _Limits(clocks=blocks * known.block_clocks)  # those by element


def _added(op: Streaming, gpu: PricedGpu, known: Any) -> _Limits:
    size = size_bytes(op.dtype)
    each = op.inner * (known.element_clocks if size >= 4 else known.narrow_clocks) + known.row_clocks
    copied = 2 * op.table * op.inner * size if op.kernels > 1 else 0  # not in place
    return _Limits(known.fixed_s, copied, op.picked * each)


def _scattered(op: Streaming, gpu: PricedGpu, known: Any) -> _Limits:
    each = known.element_clocks if op.inner > 1 else known.alone_clocks
    row, element = known.again_half_clocks if op.dtype in HALVES else (known.again_clocks, 0.0)
    waits_s = op.picked / op.table * (row + op.inner * element) / gpu.boost_clock_hz
    return _Limits(known.fixed_s, 0.0, op.picked * op.inner * each, waits_s)


def _bags(op: Streaming, gpu: PricedGpu, known: Any) -> _Limits:
    bags = max(1.0, (op.write_bytes - 8 * op.picked) / (op.inner * size_bytes(op.dtype) + 16))
    clocks = bags * (known.bag_clocks + op.inner * known.bag_element_clocks)
    clocks += op.picked * (known.row_clocks + op.inner * known.element_clocks)
    return _Limits(known.fixed_s, 0.0, clocks, op.picked / bags * known.again_clocks / gpu.boost_clock_hz)


def _put(op: Streaming, gpu: PricedGpu, known: Any) -> _Limits:
    if op.kernels == 1:
        each = op.inner * known.written_clocks + known.written_row_clocks
        return _Limits(known.written_s, 0.0, op.picked * each)
    sorts = known.million_clocks * (op.picked / 1e6) ** known.sort_power
    fixed_s = known.fixed_s[op.picked > TILE_SORTED] + clocks_s(sorts, gpu)
    # Rows that are the same are added one after another, in one warp.
    again = op.picked / op.table * min(1.0, sqrt(op.inner / known.warp_elements)) * known.again_clocks
    return _Limits(fixed_s, 0.0, op.picked * op.inner * known.element_clocks, again / gpu.boost_clock_hz)


def _embedding_gradient(op: Streaming, gpu: PricedGpu, known: Any) -> _Limits:
    row_bytes = op.inner * size_bytes(op.dtype)
    zeroed = op.table * row_bytes
    if op.picked <= TILE_SORTED:
        return _Limits(known.few_s, zeroed, 0.0, op.picked * known.few_clocks / gpu.boost_clock_hz)
    met = op.table * (1 - exp(-op.picked / op.table))
    segments = met * max(known.met_clocks, op.inner * known.element_clocks)
    fixed_s = known.fixed_s + clocks_s(op.picked * known.sort_clocks, gpu)
    return _Limits(fixed_s, zeroed, segments, moved_s(op.picked * row_bytes, gpu, gpu.constants))


def _in_kernels(op: Streaming, gpu: PricedGpu, known: Any) -> _Limits:
    return _Limits(op.kernels * known.kernel_s, op.moved_bytes)


_WAYS = (_looked_up, _added, _scattered, _bags, _put, _embedding_gradient, _in_kernels)
_LIMITS: dict[str, Callable[[Streaming, PricedGpu], _Limits]] = {
    function: partial(way, known=SimpleNamespace(**known))
    for way in _WAYS
    for known in [BY_FUNCTION["rows"][way.__name__.strip("_")]]
    for function in known["functions"].split()
}
_LOOKUPS = BY_FUNCTION["rows"]["looked_up"]["functions"].split()
