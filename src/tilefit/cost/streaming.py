"""Time of operations that stream memory."""

from __future__ import annotations

from tilefit.cost.estimate import DATASHEET, LATENCY, MATH, MEMORY, Estimate
from tilefit.cost.memory import floor_s, rate_bytes_per_s
from tilefit.cost.profiles import Constants
from tilefit.gpus import Gpu
from tilefit.ops import Streaming

#: Share of the reachable bandwidth, by role: PyTorch's eager kernels, typical values to be replaced by a
#: measured profile. A sort makes several passes, an embedding gathers rows, a loss reads its logits more
#: than once, a collective also crosses a slower link that no GPU file describes.
_SHARES = {
    "pointwise": 1.0,
    "copy": 1.0,
    "reduction": 0.9,
    "normalization": 0.85,
    "softmax": 0.85,
    "loss": 0.7,
    "embedding": 0.6,
    "indexing": 0.5,
    "sort": 0.1,
    "pooling": 0.6,
    "optimizer": 0.9,
    "collective": 0.2,
    "other": 0.6,
}
#: An access that is not coalesced on one side.
_STRIDED_SHARE = 0.5
#: Roles whose kernels synchronise a block, or whose grid waits for its slowest row: fixed time over that of
#: a plain kernel.
_REDUCING = ("reduction", "normalization", "softmax", "loss", "sort")
_REDUCING_KERNEL_FACTOR = 1.5
#: Half-width of the 80 % interval, as a factor minus one. The roles with made-of-several-passes shares are
#: the least certain.
_SPREADS = {"sort": 1.5, "indexing": 0.8, "collective": 1.5, "other": 0.8, "embedding": 0.6}
_SPREAD = 0.4


def estimate_streaming(op: Streaming, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted time of a streaming operation: bytes at the rate they reach, plus the kernels' fixed time."""
    share = _SHARES[op.role] * (_STRIDED_SHARE if op.strided else 1.0)
    moved = op.moved_bytes
    memory_s = moved / (rate_bytes_per_s(moved, gpu, constants) * share)
    # Pointwise arithmetic runs on the fp32 pipelines whatever the element type.
    math_s = op.flop / gpu.peak_flop_per_s("fp64" if op.dtype == "fp64" else "fp32")
    fixed_s = op.kernels * constants.kernel_s(gpu)
    if op.role in _REDUCING:
        fixed_s *= _REDUCING_KERNEL_FACTOR
    floor = floor_s(op, gpu)
    busy_s = max(memory_s, math_s)
    time_s = max(busy_s + fixed_s, floor)
    spread = 1.0 + _SPREADS.get(op.role, _SPREAD)
    return Estimate(
        time_s=time_s,
        low_s=max(time_s / spread, floor),
        high_s=time_s * spread,
        bound=LATENCY if busy_s < fixed_s else MATH if math_s > memory_s else MEMORY,
        math_s=math_s,
        memory_s=memory_s,
        kernel_family="streaming",
        provenance=DATASHEET,
        reason=f"{op.role}: moves {moved} bytes" + (", strided" if op.strided else ""),
    )
