"""Padding with zeros and cropping, each the gradient of the other.

Fixes pad while the model runs and never touch a parameter: weights keep their shapes, so that checkpoints,
optimizers, weight decay, gradient norms, shared weights and wrappers see the model they know. Both functions
cast on the way, since autocast would copy the tensor anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


def pad(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor [shape] in ``dtype`` that holds ``tensor`` at the beginning and zeros elsewhere.

    The tensor itself where neither shape nor element type differ.
    """
    dtype = dtype or tensor.dtype
    if tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype:
        return tensor
    return _Pad.apply(tensor, tuple(shape), dtype)  # type: ignore[no-any-return, no-untyped-call]


def crop(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The beginning [shape] of ``tensor``: the same memory, but a tensor of its own to autograd.

    Unlike a slice it may be changed in place, and its gradient is written once, next to the zeros, instead
    of into a tensor of zeros.
    """
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    return _Crop.apply(tensor, tuple(shape), tensor.dtype)  # type: ignore[no-any-return, no-untyped-call]


def working_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The element type in which a matrix product or convolution of ``tensor`` would run now."""
    device = tensor.device.type
    if tensor.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


_NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}


def _empty(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory laid out like the tensor's: NHWC where channels are contiguous, also those of a crop."""
    if tensor.dim() in _NHWC and tensor.shape[1] > 1 and tensor.stride(1) == 1:
        return torch.empty(shape, dtype=dtype, device=tensor.device, memory_format=_NHWC[tensor.dim()])
    return tensor.new_empty(shape, dtype=dtype)


class _Pad(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out = _empty(tensor, shape, dtype)
        kept = out
        for axis, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)):
            if old != new:
                kept.narrow(axis, old, new - old).zero_()
                kept = kept.narrow(axis, 0, old)
        kept.copy_(tensor)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.shape, ctx.dtype = tuple(inputs[0].shape), inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Crop.apply(gradient, ctx.shape, ctx.dtype), None, None  # type: ignore[no-untyped-call]


class _Crop(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        for axis, size in enumerate(shape):
            tensor = tensor.narrow(axis, 0, size)
        # Detached, it is no view to autograd, and may be changed in place.
        return tensor.detach() if tensor.dtype == dtype else tensor.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.shape, ctx.dtype = tuple(inputs[0].shape), inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Pad.apply(gradient, ctx.shape, ctx.dtype), None, None  # type: ignore[no-untyped-call]
