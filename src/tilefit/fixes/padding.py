"""Padding with zeros and cropping, each the gradient of the other.

Fixes pad while the model runs and never touch a parameter: weights keep their shapes, so that checkpoints,
optimizers, weight decay, gradient norms, shared weights and wrappers see the model they know. Both functions
cast on the way, since autocast would copy the tensor anyway.

PyTorch's own functions write every gradient twice, zeros first, and pad in a kernel of its own. For small
tensors that is cheaper than a gradient written in Python, and they are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

#: Elements up to which PyTorch's functions are used: moving them twice takes a microsecond or two on a GPU, a
#: ``Function`` some ten more on the host.
SMALL = 1 << 19


def pad(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor [shape] in ``dtype`` that holds ``tensor`` at the beginning and zeros elsewhere.

    The tensor itself where neither shape nor element type differ.
    """
    dtype = dtype or tensor.dtype
    more = [new - old for old, new in zip(tensor.shape, shape, strict=True)]
    if not any(more):
        return tensor.to(dtype)
    if tensor.numel() <= SMALL:
        ends = [size for extra in reversed(more) for size in (0, extra)]
        return torch.constant_pad_nd(tensor.to(dtype), ends)
    return _apply(_Pad, _TransformedPad, tensor, tuple(shape), dtype)


def crop(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The beginning [shape] of ``tensor``, in the same memory; it may be changed in place."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    if tensor.numel() <= SMALL:
        return _narrowed(tensor, shape)
    return _apply(_Crop, _TransformedCrop, tensor, tuple(shape), tensor.dtype)


def working_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The element type in which a matrix product or convolution of ``tensor`` would run now."""
    device = tensor.device.type
    if tensor.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


# ---- for large tensors -------------------------------------------------------------------------


def _padded(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    out = _empty(tensor, shape, dtype)
    kept = out
    for axis, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)):
        if old != new:
            kept.narrow(axis, old, new - old).zero_()
            kept = kept.narrow(axis, 0, old)
    kept.copy_(tensor)
    return out


def _cropped(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = _narrowed(tensor, shape)
    # Detached, it is no view to autograd, and may be changed in place.
    return tensor.detach() if tensor.dtype == dtype else tensor.to(dtype)


def _narrowed(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for axis, size in enumerate(shape):
        if tensor.shape[axis] != size:
            tensor = tensor.narrow(axis, 0, size)
    return tensor


_NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}


def _empty(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory laid out like the tensor's: NHWC where channels are contiguous, also those of a crop."""
    if tensor.dim() in _NHWC and tensor.shape[1] > 1 and tensor.stride(1) == 1:
        return torch.empty(shape, dtype=dtype, device=tensor.device, memory_format=_NHWC[tensor.dim()])
    return tensor.new_empty(shape, dtype=dtype)


def _apply(function: type[Function], transformed: type[Function], *args: Any) -> torch.Tensor:
    """Apply a function, in the form that ``torch.func`` asks for where that is at work: it takes longer."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        function = transformed
    return function.apply(*args)  # type: ignore[no-any-return, no-untyped-call]


class _Pad(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        ctx.shape, ctx.dtype = tuple(tensor.shape), tensor.dtype
        return _padded(tensor, shape, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # it will be differentiated again
            return _apply(_Crop, _TransformedCrop, gradient, ctx.shape, ctx.dtype), None, None
        return _cropped(gradient, ctx.shape, ctx.dtype), None, None


class _Crop(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        ctx.shape, ctx.dtype = tuple(tensor.shape), tensor.dtype
        return _cropped(tensor, shape, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return _apply(_Pad, _TransformedPad, gradient, ctx.shape, ctx.dtype), None, None
        return _padded(gradient, ctx.shape, ctx.dtype), None, None


class _Transformed:
    """What ``torch.func`` asks of a function."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.shape, ctx.dtype = tuple(inputs[0].shape), inputs[0].dtype


class _TransformedPad(_Transformed, _Pad):
    @staticmethod
    def forward(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        return _padded(tensor, shape, dtype)


class _TransformedCrop(_Transformed, _Crop):
    @staticmethod
    def forward(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        return _cropped(tensor, shape, dtype)
