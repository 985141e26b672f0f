"""How tensors lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether PyTorch takes an image batch or filters for NHWC: channels before columns before rows, perhaps
    with gaps (the formula of c10/core/MemoryFormat.h, which settles the cases with sizes of 1)."""
    if tensor.dim() not in (4, 5) or tensor.stride(1) == 0:
        return False
    least = 0
    for axis in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(1, size)
    return True


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a view: an expanded dimension holds one element."""
    elements = prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0
    )
    return elements * tensor.element_size()


def innermost(tensor: torch.Tensor) -> int:
    """The dimension that is contiguous in memory, ignoring those of one element."""
    real = [
        (stride, -i) for i, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if n > 1
    ]
    return -min(real)[1] if real else 0


def transposes(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> bool:
    """Whether the first operand and the result differ in which dimension is contiguous."""
    return (
        bool(read)
        and bool(written)
        and read[0].shape == written[0].shape
        and innermost(read[0]) != innermost(written[0])
    )


def common_run(read: Sequence[torch.Tensor], whole: torch.Tensor) -> int:
    """Elements that lie together both in ``whole`` and in every operand; 0 where all of them do.

    Args:
        read: Operands that are broadcast to ``whole``, or pieces of it (of a concatenation, a slice). One of
            a single element, or of another number of dimensions than can be broadcast, is left out.
        whole: The result, or of a slice's gradient the tensor it is a slice of.
    """
    order = sorted((d for d in range(whole.dim()) if whole.shape[d] > 1), key=lambda d: (whole.stride(d), -d))
    shortest = 0
    for operand in (*read, whole):
        missing = whole.dim() - operand.dim()
        if operand.numel() <= 1 or missing < 0:
            continue
        run = expected = expected_whole = 1
        for d in order:
            size = operand.shape[d - missing] if d >= missing else 1
            stride = operand.stride(d - missing) if size > 1 else -1
            if stride != expected or whole.stride(d) != expected_whole:
                break
            run *= size
            expected *= size
            expected_whole *= whole.shape[d]
            if size != whole.shape[d]:
                break
        shortest = min(shortest, run) if shortest else run
    return 0 if shortest >= whole.numel() else shortest
