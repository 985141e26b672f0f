"""Rows of a table that are looked up, written or added to by their numbers: what that takes beside the bytes.

A lookup launches a block for each row. What is added to rows that may be the same is sorted first
(``index_put`` with ``accumulate``, the gradient of an embedding), or added element by element
(``index_add``). The constants are those of the kernels on an H200 (``benchmarks/row_access.py``: 500 to a
million random rows of 1 to 1,024 elements in tables of 200 to a million), in clocks of a multiprocessor where
they grow with the rows. Of the same sizes on an H100, of which nothing is fitted, the median error is 6 to
10 %.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sqrt
from typing import NamedTuple

from tilefit.cost.estimate import LATENCY, MEMORY, Estimate
from tilefit.cost.memory import clocks_s, floor_s, moved_s
from tilefit.cost.priced import PricedGpu
from tilefit.ops import Op, Streaming
from tilefit.ops.dtypes import HALVES, size_bytes

#: A block of a lookup, and the bytes that it takes.
_LOOKED_UP_CLOCKS, _BLOCK_BYTES = 145.0, 4096
#: Additions one by one: an element in fp32 and in 16 bits, and a row.
_ADDED_CLOCKS = {4: 1.72, 2: 2.05}
_ADDED_ROW_CLOCKS, _ADDED_S = 2.4, 2e-6
#: Rows scattered: an element of rows that are added whole, one of those added by their own numbers.
_SCATTERED_CLOCKS, _SCATTERED_EACH_CLOCKS, _SCATTERED_S = 0.72, 1.7, 8e-6
#: A row that is added to one that was, after it: in fp32, and in 16 bits, with its elements.
_SCATTERED_AGAIN_CLOCKS = 4.8
_SCATTERED_AGAIN_HALF_CLOCKS, _SCATTERED_AGAIN_ELEMENT_CLOCKS = 8.4, 0.22
#: Bags of rows: a bag and its elements, a row and its elements, and a row after the one before it in its bag
#: (an H100, ``benchmarks/function_times.py``).
_BAG_CLOCKS, _BAG_ELEMENT_CLOCKS, _BAG_ROW_CLOCKS, _BAG_ROW_ELEMENT_CLOCKS = 60.0, 2.6, 4.0, 0.5
_BAG_WAIT_CLOCKS = 500.0
#: Rows written.
_WRITTEN_CLOCKS, _WRITTEN_ROW_CLOCKS, _WRITTEN_S = 1.06, 3.6, 4.5e-6
#: Rows added in order: up to so many by one sorting kernel; their checks and kernels; a million's sort, which
#: grows with a power of their number; an element; and a row that is added to one that was, after it.
_TILE_SORTED = 3072
_FEW_S, _MANY_S = 24e-6, 40e-6
_SORTED_ROWS, _SORTED_CLOCKS, _SORTED_POWER = 1e6, 53.1, 0.62
_PUT_CLOCKS, _PUT_AGAIN_CLOCKS, _WARP_ELEMENTS = 0.435, 1430.0, 64
#: The gradient of an embedding: a row of few, one after another; the kernels of many, and a row's sort; two
#: kernels of a block for each row that is met, and an element of it.
_FEW_ROW_CLOCKS, _FEW_ROWS_S = 53.0, 2e-6
_SEGMENTS_S, _SEGMENT_SORT_CLOCKS = 75e-6, 48.0
_SEGMENT_CLOCKS, _SEGMENT_ELEMENT_CLOCKS = 507.0, 4.8
#: Each of the kernels of a small sparse product.
_KERNEL_S = 2e-6
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


def _looked_up(op: Streaming, gpu: PricedGpu) -> _Limits:
    row_bytes = op.inner * size_bytes(op.dtype)
    blocks = op.picked * -(-row_bytes // _BLOCK_BYTES)
    return _Limits() if row_bytes % 16 else _Limits(clocks=blocks * _LOOKED_UP_CLOCKS)  # those by element


def _added(op: Streaming, gpu: PricedGpu) -> _Limits:
    size = size_bytes(op.dtype)
    each = op.inner * _ADDED_CLOCKS[4 if size >= 4 else 2] + _ADDED_ROW_CLOCKS
    copied = 2 * op.table * op.inner * size if op.kernels > 1 else 0  # not in place
    return _Limits(_ADDED_S, copied, op.picked * each)


def _scattered(op: Streaming, gpu: PricedGpu) -> _Limits:
    each = _SCATTERED_CLOCKS if op.inner > 1 else _SCATTERED_EACH_CLOCKS
    again = _SCATTERED_AGAIN_CLOCKS
    if op.dtype in HALVES:
        again = _SCATTERED_AGAIN_HALF_CLOCKS + op.inner * _SCATTERED_AGAIN_ELEMENT_CLOCKS
    waits_s = op.picked / op.table * again / gpu.boost_clock_hz
    return _Limits(_SCATTERED_S, 0.0, op.picked * op.inner * each, waits_s)


def _bags(op: Streaming, gpu: PricedGpu) -> _Limits:
    bags = max(1.0, (op.write_bytes - 8 * op.picked) / (op.inner * size_bytes(op.dtype) + 16))
    clocks = bags * (_BAG_CLOCKS + op.inner * _BAG_ELEMENT_CLOCKS)
    clocks += op.picked * (_BAG_ROW_CLOCKS + op.inner * _BAG_ROW_ELEMENT_CLOCKS)
    return _Limits(_KERNEL_S, 0.0, clocks, op.picked / bags * _BAG_WAIT_CLOCKS / gpu.boost_clock_hz)


def _put(op: Streaming, gpu: PricedGpu) -> _Limits:
    if op.kernels == 1:
        return _Limits(_WRITTEN_S, 0.0, op.picked * (op.inner * _WRITTEN_CLOCKS + _WRITTEN_ROW_CLOCKS))
    sorts = _SORTED_ROWS * _SORTED_CLOCKS * (op.picked / _SORTED_ROWS) ** _SORTED_POWER
    fixed_s = (_FEW_S if op.picked <= _TILE_SORTED else _MANY_S) + clocks_s(sorts, gpu)
    # Rows that are the same are added one after another, in one warp.
    again = op.picked / op.table * min(1.0, sqrt(op.inner / _WARP_ELEMENTS)) * _PUT_AGAIN_CLOCKS
    return _Limits(fixed_s, 0.0, op.picked * op.inner * _PUT_CLOCKS, again / gpu.boost_clock_hz)


def _embedding_gradient(op: Streaming, gpu: PricedGpu) -> _Limits:
    row_bytes = op.inner * size_bytes(op.dtype)
    zeroed = op.table * row_bytes
    if op.picked <= _TILE_SORTED:
        return _Limits(_FEW_ROWS_S, zeroed, 0.0, op.picked * _FEW_ROW_CLOCKS / gpu.boost_clock_hz)
    met = op.table * (1 - exp(-op.picked / op.table))
    segments = met * max(_SEGMENT_CLOCKS, op.inner * _SEGMENT_ELEMENT_CLOCKS)
    fixed_s = _SEGMENTS_S + clocks_s(op.picked * _SEGMENT_SORT_CLOCKS, gpu)
    return _Limits(fixed_s, zeroed, segments, moved_s(op.picked * row_bytes, gpu, gpu.constants))


def _in_kernels(op: Streaming, gpu: PricedGpu) -> _Limits:
    """So many small kernels, and the bytes."""
    return _Limits(op.kernels * _KERNEL_S, op.moved_bytes)


_LOOKUPS = ("embedding", "index", "index_select", "gather")
_LIMITS: dict[str, Callable[[Streaming, PricedGpu], _Limits]] = {
    **dict.fromkeys(_LOOKUPS, _looked_up),
    "index_add": _added,
    "scatter_add": _scattered,
    **dict.fromkeys(("index_put", "index_put_impl", "unsafe_index_put"), _put),
    **dict.fromkeys(("embedding_dense_backward", "_embedding_bag_backward"), _embedding_gradient),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _bags),
    "tilefit.sparse_product": _in_kernels,
    "tilefit.coalesced_values": _in_kernels,
}
