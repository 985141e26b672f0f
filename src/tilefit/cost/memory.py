"""Time to move bytes: DRAM, the L2 cache, and the floor no kernel can beat."""

from __future__ import annotations

from tilefit.cost.constants import Constants, clock_headroom
from tilefit.gpus import Gpu
from tilefit.ops import Op

#: The widest an L2 cache delivers, in bytes per clock and SM: two 32-byte sectors. Only floors use it.
L2_LIMIT_BYTES_PER_CLOCK_PER_SM = 64


#: GPUs whose L2 cache is two partitions, each of which keeps what the multiprocessors beside it read, so that
#: what all read is held twice (NVIDIA A100 whitepaper).
_TWO_PARTITIONS = ((8, 0), (9, 0), (10, 0), (10, 3))


def rate_bytes_per_s(
    footprint_bytes: float, gpu: Gpu, constants: Constants, passed_on: bool = False
) -> float:
    """Rate at which an operation that touches so many bytes is served, at best.

    Small operands are still in the L2 cache from the operation before; the share served from it falls
    steeply once the bytes outgrow the cache, as in any cache that evicts the least recently used.

    Args:
        passed_on: They are what one operation passes on to the next, and all that is touched in between.
    """
    dram = gpu.memory_bandwidth_bytes_per_s * constants.memory_efficiency
    cache = gpu.sms * gpu.boost_clock_hz * constants.l2_bytes_per_clock_per_sm
    if cache <= dram or not gpu.l2_bytes:
        return dram
    share = constants.l2_share
    if passed_on:
        share = 0.5 if gpu.compute_capability in _TWO_PARTITIONS else 1.0
    fill = footprint_bytes / (share * gpu.l2_bytes)
    hit = 1.0 / (1.0 + fill * fill * fill * fill)
    return 1.0 / ((1.0 - hit) / dram + hit / cache)


def moved_s(moved_bytes: float, gpu: Gpu, constants: Constants) -> float:
    """Time that an operation which touches so many bytes once keeps the memory busy, at least."""
    return moved_bytes / rate_bytes_per_s(moved_bytes, gpu, constants)


def clocks_s(clocks: float, gpu: Gpu) -> float:
    """Time of so many clocks of a multiprocessor, shared by all of them."""
    return clocks / (gpu.sms * gpu.boost_clock_hz)


def floor_s(op: Op, gpu: Gpu) -> float:
    """The least time physics allows: the peak at the highest clock, and the bytes.

    Bytes beyond the L2's capacity must cross the memory bus; the others at best come from the L2.
    """
    moved = op.moved_bytes
    beyond = max(0, moved - gpu.l2_bytes)
    cache = gpu.sms * gpu.boost_clock_hz * L2_LIMIT_BYTES_PER_CLOCK_PER_SM
    memory = beyond / gpu.memory_bandwidth_bytes_per_s + (moved - beyond) / cache
    return max(op.flop / (gpu.peak_flop_per_s(op.dtype) * clock_headroom(gpu)), memory)
