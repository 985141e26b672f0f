"""What no GPU can do, by the numbers that its maker publishes; the model's own floor is not asked."""

from __future__ import annotations

from tilefit import gpus
from tilefit.gpus import Gpu
from tilefit.ops import Op

#: Published numbers are rounded.
ROUNDED = 0.97


def least_s(op: Op, gpu: Gpu | str, saved: float = 1.0) -> float:
    """Time below which an operation cannot run.

    Its arithmetic at the published dense peak, and the bytes that the L2 cannot hold at the published
    bandwidth. ``saved``: how many times less arithmetic an algorithm does than is counted.
    """
    device = gpus.get(gpu) if isinstance(gpu, str) else gpu
    peaks = device.datasheet_peak_flop_per_s
    math_s = op.flop / saved / peaks.get(op.dtype, peaks["fp32"])
    memory_s = (op.moved_bytes - device.l2_bytes) / device.datasheet_bandwidth_bytes_per_s
    return ROUNDED * max(math_s, memory_s)
