"""Time of operations that stream memory."""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost.constants import Constants
from tilefit.cost.estimate import DATASHEET, LATENCY, MATH, MEMORY, Estimate
from tilefit.cost.memory import floor_s, rate_bytes_per_s
from tilefit.gpus import Gpu
from tilefit.ops import Op, Streaming

#: ``Streaming.function`` of a kernel that the compiler wrote, and of one that applies the given statistics of
#: a batch norm.
GENERATED = "generated"
APPLIED = "batch_norm_elemt"

#: Share of the reachable bandwidth, by role: PyTorch's eager kernels, typical values to be replaced by a
#: calibration. A sort makes several passes, an embedding gathers rows, a loss reads its logits more
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
#: What the kernel computes, beside its traffic, that applies given statistics of a batch norm: FLOP per
#: element at the fp32 peak; in NCHW, and in NHWC. On an H200 (``benchmarks/results/
#: whole_steps_inference.json``, kernels ``batch_norm_transform_input``) it took this much longer than a
#: pointwise kernel: 2.1 and 2.3 ps an element in ResNet-50 and MobileNet, 1.3 ps in the small odd_cnn; in
#: NHWC 0.7 and 1.1 ps in ResNet-50 and EfficientNet.
_APPLIED_FLOP = {False: 145.0, True: 60.0}


def traffic(op: Op) -> Op:
    """An operation that does nothing but move its bytes, of one that is priced by these and its work: a
    kernel that a compiler wrote, or one that applies given statistics."""
    if not isinstance(op, Streaming):
        return op
    if op.function == GENERATED:
        return replace(op, flop_per_element=0.0)
    return replace(op, role="pointwise", strided=False) if op.function == APPLIED else op


def with_work(op: Op, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of an operation, from that of its :func:`traffic`: what it computes comes on top."""
    if not isinstance(op, Streaming) or op.function not in (GENERATED, APPLIED):
        return estimate
    flop = op.flop if op.function == GENERATED else op.elements * _APPLIED_FLOP[op.strided]
    math_s = flop / gpu.peak_flop_per_s("fp64" if op.dtype == "fp64" else "fp32")
    return replace(
        estimate,
        time_s=estimate.time_s + math_s,
        low_s=estimate.low_s + math_s,
        high_s=estimate.high_s + math_s,
        math_s=math_s,
        bound=MATH if math_s > estimate.time_s else estimate.bound,
    )


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
