"""What a step takes of a GPU's memory beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from tilefit.cost.conv_kernels import workspace_bytes
from tilefit.gpus import Gpu
from tilefit.ops import Conv, Step
from tilefit.ops.allocator import replayed

#: Share of the memory that tensors can fill; the rest goes to the CUDA context, library workspaces and the
#: allocator's fragmentation. A choice, not a measurement.
USABLE_SHARE = 0.94
#: Workspace that PyTorch gives cuBLAS for each handle: ``getChosenWorkspaceSize`` of
#: aten/src/ATen/cuda/CublasHandlePool.cpp, for Hopper and for others.
_CUBLAS_HOPPER_BYTES, _CUBLAS_BYTES = 32 << 20, (4096 * 2 + 16 * 8) << 10
#: The CUDA context with PyTorch's kernels. A choice: it is some 0.3 to 0.6 GiB, by driver and GPU.
CONTEXT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that are taken beside the tensors that are alive at the peak.

    Attributes:
        allocator_bytes: By which the caching allocator reserves more: rounding and fragmentation. It is
            replayed with PyTorch's default settings, from an empty GPU on; 0 where no timeline is known.
        library_bytes: cuBLAS's workspaces; the thread of the backward pass has a handle of its own; and what
            cuDNN takes for a while beyond the peak.
        context_bytes: The CUDA context.
    """

    allocator_bytes: int = 0
    library_bytes: int = 0
    context_bytes: int = 0


def usable_bytes(gpu: Gpu) -> float:
    """What the tensors of a step can take of a GPU's memory."""
    return USABLE_SHARE * gpu.memory_bytes


def footprint(step: Step, gpu: Gpu) -> Footprint:
    """What ``step`` takes of a GPU beside its tensors."""
    if not step.memory.timeline.events:
        return Footprint()
    workspace = _CUBLAS_HOPPER_BYTES if gpu.architecture == "hopper" else _CUBLAS_BYTES
    multiplies = any(entry.op.kind == "gemm" for entry in step.ops)
    return Footprint(
        replayed(step.memory.timeline).reserved_bytes - step.memory.peak_bytes,
        workspace * multiplies * (1 + step.settings.training) + converted_bytes(step, gpu),
        CONTEXT_BYTES,
    )


def converted_bytes(step: Step, gpu: Gpu) -> int:
    """Bytes by which what convolutions take while they run, with what is alive then, exceeds the peak."""
    held, most = 0, step.memory.peak_bytes
    for _, index, size in step.memory.timeline.changes():
        held += size
        op = step.ops[index].op if size > 0 and index < len(step.ops) else None
        if isinstance(op, Conv):
            most = max(most, held + workspace_bytes(op, gpu))
    return most - step.memory.peak_bytes
