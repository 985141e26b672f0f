"""The roof over an operation: what its arithmetic and its bytes take at least on a GPU."""

from __future__ import annotations

from tilefit.ops import PRODUCTS
from tilefit.report.report import Device, OpRow


def peaks(device: Device) -> dict[str, float]:
    """The peak of each element type; of the main one alone in a report that does not hold the others."""
    return device.peaks_flop_per_s or {device.peak_dtype: device.peak_flop_per_s}


def peak_dtype(op: OpRow, device: Device) -> str:
    """The element type whose peak an operation's arithmetic can reach."""
    # The arithmetic of other kinds runs on the fp32 pipelines.
    wanted = op.dtype if op.kind in PRODUCTS or op.dtype == "fp64" else "fp32"
    return next((name for name in (wanted, "fp32") if name in peaks(device)), device.peak_dtype)


def floor_s(op: OpRow, device: Device) -> float:
    """The time an operation would take on the roof: its arithmetic at the peak, or its bytes at full rate."""
    peak = peaks(device)[peak_dtype(op, device)]
    return max(op.flop / peak, op.moved_bytes / device.memory_bandwidth_bytes_per_s)
