"""Tensors with zeros among their elements, and without them again.

Parameters keep their real sizes and are copied to their wide places while the model runs, cast on the way,
since autocast would copy them anyway. What is cropped is a tensor of its own, in the memory format of the
padded one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

#: Of a dimension: its elements, and these with the padding behind them.
Channels = tuple[int, int]
#: Dimensions (not negative) that are padded.
Places = dict[int, Channels]

NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}

#: Elements up to which tensors are zeroed as a whole before they are filled, and PyTorch's own function
#: crops, which does the same to a gradient: a GPU takes a few microseconds for it, and the host the least.
SMALL = 1 << 23

#: Host time that a padded layer's Python adds to a training step beside launches, on the host of the launch
#: constants (``cost/launch.py``): the twelve of an encoder that then waits for the host (``odd-encoder`` in
#: ``benchmarks/results/fix_gain_slow_hosts_h200.json``) took 0.15 to 0.3 ms each at 1.2 times those.
LAYER_S = 150e-6
#: The same for a layer that lays out its image in NHWC: a tenth of what a convolution's forward pass takes
#: the host (13 of 119 us on a slow CPU).
REGION_S = 6e-6


def widen(
    tensors: Sequence[tuple[torch.Tensor, Places]],
    dtype: torch.dtype,
    *,
    nhwc: bool = False,
    watched: Sequence[torch.Tensor] = (),
) -> Sequence[torch.Tensor]:
    """Tensors in ``dtype`` with zeros behind the elements of their dimensions.

    Args:
        tensors: Each with the dimensions that are padded, if there are more elements with the padding.
        dtype: Of the results.
        nhwc: Results of four or five dimensions are laid out in NHWC.
        watched: Those of them that must not be written to before the gradient is computed, unless they are
            cast: what PyTorch multiplies must not be either.
    """
    tensors = [(t, {at: c for at, c in places.items() if c[0] < c[1]}) for t, places in tensors]
    if torch.compiler.is_compiling():
        return [_padded(tensor.to(dtype), places) for tensor, places in tensors]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in tensors):
        only, places = zip(*tensors, strict=True)
        kept = [tensor for tensor in watched if tensor.dtype == dtype]
        return _Widen.apply((dtype, nhwc, kept), places, *only)  # type: ignore[no-any-return, no-untyped-call]
    return [_filled(tensor, places, dtype, nhwc) for tensor, places in tensors]


def crop(tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
    """The elements that a dimension holds where it is padded, in memory of their own."""
    if channels[0] == channels[1]:
        return tensor
    if torch.compiler.is_compiling() or tensor.numel() <= SMALL:
        # The gradient of a slice would be contiguous, whatever the image is.
        return _padded(tensor, {axis: (channels[1], channels[0])})
    return _Crop.apply(tensor, axis, channels)  # type: ignore[no-any-return, no-untyped-call]


def _padded(tensor: torch.Tensor, places: Places) -> torch.Tensor:
    """In PyTorch's own function, which can be differentiated in any way and is fused by its compiler."""
    pads = [0] * (2 * tensor.dim())
    for axis, (real, wide) in places.items():
        pads[-2 * axis - 1] = wide - real
    return torch.constant_pad_nd(tensor, pads) if places else tensor


def _filled(tensor: torch.Tensor, places: Places, dtype: torch.dtype, nhwc: bool) -> torch.Tensor:
    """In two kernels where it is small, whatever the dimensions."""
    shape = list(tensor.shape)
    for axis, (_, wide) in places.items():
        shape[axis] = wide
    layout = NHWC[len(shape)] if nhwc and len(shape) in NHWC else torch.contiguous_format
    inner = out = torch.empty(shape, dtype=dtype, device=tensor.device, memory_format=layout)
    if out.numel() <= SMALL:
        out.zero_()
    for axis, (real, wide) in places.items():
        if out.numel() > SMALL:
            inner.narrow(axis, real, wide - real).zero_()
        inner = inner.narrow(axis, 0, real)
    inner.copy_(tensor)
    return out


class _Widen(Function):
    @staticmethod
    def forward(ctx: Any, how: Any, places: tuple[Places, ...], *tensors: torch.Tensor) -> Any:
        dtype, nhwc, watched = how
        # Not kept alive: the original would be, but in place of the padded copy.
        ctx.watched = [(weakref.ref(tensor), tensor._version) for tensor in watched]
        ctx.places, ctx.kinds = places, [(t.dtype, t.is_contiguous()) for t in tensors]
        ctx.set_materialize_grads(False)
        made = tuple(_filled(t, each, dtype, nhwc) for t, each in zip(tensors, places, strict=True))
        # Or products would be differentiated by what needs no gradient.
        ctx.mark_non_differentiable(
            *(t for t, asks in zip(made, ctx.needs_input_grad[2:], strict=True) if not asks)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if any((t := watched()) is not None and t._version != v for watched, v in ctx.watched):
            raise RuntimeError(
                "a weight or an input was changed in place before the gradient of their product was computed"
            )
        found: list[torch.Tensor | None] = [None, None]
        for gradient, places, (dtype, contiguous) in zip(gradients, ctx.places, ctx.kinds, strict=True):
            if gradient is not None:
                for axis, (real, _) in places.items():
                    gradient = gradient.narrow(axis, 0, real)
                # In the cast at once, and not once more where the gradient is accumulated.
                is_image = gradient.dim() in NHWC and contiguous
                layout = torch.contiguous_format if is_image else torch.preserve_format
                gradient = gradient.to(dtype, memory_format=layout)
            found.append(gradient)
        return tuple(found)


class _Crop(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
        layout = NHWC.get(tensor.dim())
        ctx.nhwc = layout is not None and tensor.is_contiguous(memory_format=layout)
        ctx.places = {axis: channels}
        return tensor.narrow(axis, 0, channels[0]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return widen([(gradient, ctx.places)], gradient.dtype, nhwc=ctx.nhwc)[0], None, None
