"""Tensors with zeros among their elements, and without them again.

What stays padded from layer to layer comes as segments: ``((60, 64), (30, 32))`` are 60 channels padded to
64 and, behind them, 30 padded to 32, which is what concatenating two padded images gives. Parameters keep
their real sizes and are copied to their wide places while the model runs, cast on the way, since autocast
would copy them anyway. What is cropped is a tensor of its own, in the memory format of the padded one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import Function

#: Segments of a dimension, each as (elements, elements with the padding behind them).
Channels = tuple[tuple[int, int], ...]
#: Dimensions (not negative) that are padded.
Places = dict[int, Channels]

NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}

#: Elements up to which tensors are zeroed as a whole before they are filled, and PyTorch's own functions
#: crop, which do the same to a gradient: a GPU takes a few microseconds for it, and the host the least.
SMALL = 1 << 23

#: Host time that a padded layer's Python adds to a training step beside launches, on the host of the launch
#: constants (``cost/launch.py``): the twelve of an encoder that then waits for the host (``odd-encoder`` in
#: ``benchmarks/results/fix_gain_slow_hosts_h200.json``) took 0.15 to 0.3 ms each at 1.2 times those.
LAYER_S = 150e-6
#: The same for a layer that lays out its image in NHWC, or that looks for its region: a tenth of what a
#: convolution's forward pass takes the host (13 of 119 us on a slow CPU), and 3 us to compare what it reads.
REGION_S = 6e-6
#: For each module that is compared when a region is entered: 0.18 ms for 150 of them on a slow CPU.
COMPARED_S = 0.65e-6


def real_size(channels: Channels) -> int:
    """The elements themselves."""
    return channels[0][0] if len(channels) == 1 else sum(real for real, _ in channels)


def wide_size(channels: Channels) -> int:
    """The elements with their padding."""
    return channels[0][1] if len(channels) == 1 else sum(wide for _, wide in channels)


def behind_one_another(images: Iterable[Channels]) -> Channels:
    """The channels of images that are concatenated; segments without a gap between them are one.

    >>> behind_one_another([((64, 64),), ((60, 64),)])
    ((124, 128),)
    """
    joined: list[tuple[int, int]] = []
    for real, wide in (segment for channels in images for segment in channels):
        if joined and joined[-1][0] == joined[-1][1]:
            real, wide = joined[-1][0] + real, joined.pop()[1] + wide
        joined.append((real, wide))
    return tuple(joined)


def widen(
    tensors: Sequence[tuple[torch.Tensor, Places]],
    dtype: torch.dtype,
    *,
    nhwc: bool = False,
    watched: Sequence[torch.Tensor] = (),
) -> Sequence[torch.Tensor]:
    """Tensors in ``dtype`` with zeros behind the segments of their dimensions.

    Args:
        tensors: Each with the dimensions that are padded.
        dtype: Of the results.
        nhwc: Results of four or five dimensions are laid out in NHWC.
        watched: Those of them that must not be written to before the gradient is computed, unless they are
            cast: what PyTorch multiplies must not be either.
    """
    if torch.compiler.is_compiling():
        return [_widened(tensor.to(dtype), places) for tensor, places in tensors]
    if torch.is_grad_enabled() and (tensors[0][0].requires_grad or any(t.requires_grad for t, _ in tensors)):
        only, places = zip(*tensors, strict=True)
        kept = [tensor for tensor in watched if tensor.dtype == dtype]
        return _Widen.apply((dtype, nhwc, kept), places, *only)  # type: ignore[no-any-return, no-untyped-call]
    return [_filled(tensor, places, dtype, nhwc) for tensor, places in tensors]


def crop(tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
    """The elements that a padded dimension holds, in memory of their own."""
    if tensor.numel() > SMALL and tensor.requires_grad and not torch.compiler.is_compiling():
        return _Crop.apply(tensor, axis, channels)  # type: ignore[no-any-return, no-untyped-call]
    return _cropped(tensor, axis, channels)


def clear(tensor: torch.Tensor, axis: int, channels: Channels) -> None:
    """Make zeros of the padding of a dimension: what is infinite times zero is no number."""
    tensor, start = tensor.detach(), 0
    for real, wide in channels:
        if wide > real:
            tensor.narrow(axis, start + real, wide - real).zero_()
        start += wide


def spread(vector: torch.Tensor, channels: Channels, gaps: Sequence[torch.Tensor]) -> torch.Tensor:
    """A vector [channels] with the zeros of each gap behind each segment, in one kernel."""
    if len(channels) == 1:
        return torch.cat((vector, gaps[0]))
    pieces: Sequence[torch.Tensor] = torch.split(vector, [real for real, _ in channels])
    return torch.cat([part for pair in zip(pieces, gaps, strict=True) for part in pair])


def narrowed(tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
    """The elements that a padded dimension holds; a view if there is but one segment."""
    if len(channels) == 1:
        return tensor.narrow(axis, 0, channels[0][0])
    starts = accumulate((wide for _, wide in channels), initial=0)
    pieces = [tensor.narrow(axis, start, real) for start, (real, _) in zip(starts, channels, strict=False)]
    return torch.cat(pieces, axis)


def _cropped(tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
    inner = narrowed(tensor, axis, channels)
    if len(channels) > 1:
        return inner
    return inner.clone(memory_format=NHWC[tensor.dim()] if _is_nhwc(tensor) else torch.contiguous_format)


def _is_nhwc(tensor: torch.Tensor) -> bool:
    return tensor.dim() in NHWC and tensor.is_contiguous(memory_format=NHWC[tensor.dim()])


def _widened(tensor: torch.Tensor, places: Places) -> torch.Tensor:
    """In PyTorch's own functions, which can be differentiated in any way and are fused by its compiler."""
    pads = [0] * (2 * tensor.dim())
    for axis, channels in places.items():
        if len(channels) == 1:
            pads[-2 * axis - 1] = channels[0][1] - channels[0][0]
            continue
        shape = list(tensor.shape)
        pieces = []
        sizes = [real for real, _ in channels]
        for piece, (real, wide) in zip(torch.split(tensor, sizes, axis), channels, strict=True):
            shape[axis] = wide - real
            pieces += [piece, tensor.new_zeros(shape)]
        tensor = torch.cat(pieces, axis)
    return torch.constant_pad_nd(tensor, pads) if any(pads) else tensor


def _filled(tensor: torch.Tensor, places: Places, dtype: torch.dtype, nhwc: bool) -> torch.Tensor:
    """In two kernels where there is but one segment, whatever the dimensions."""
    shape = list(tensor.shape)
    for axis, channels in places.items():
        shape[axis] = wide_size(channels)
    layout = NHWC[len(shape)] if nhwc and len(shape) in NHWC else torch.contiguous_format
    out = torch.empty(shape, dtype=dtype, device=tensor.device, memory_format=layout)
    is_zeroed = out.numel() <= SMALL
    inner = out.zero_() if is_zeroed else out
    if is_zeroed and all(len(channels) == 1 for channels in places.values()):
        for axis, ((real, wide),) in places.items():
            inner = inner.narrow(axis, 0, real) if wide > real else inner
        inner.copy_(tensor)
    else:
        _fill(out, tensor, list(places.items()))
    return out


def _fill(out: torch.Tensor, tensor: torch.Tensor, places: list[tuple[int, Channels]]) -> None:
    if not places:
        out.copy_(tensor)
        return
    (axis, channels), *others = places
    start = wide_start = 0
    for real, wide in channels:
        if wide > real:
            out.narrow(axis, wide_start + real, wide - real).zero_()
        piece = tensor.narrow(axis, start, real) if len(channels) > 1 else tensor
        _fill(out.narrow(axis, wide_start, real), piece, others)
        start, wide_start = start + real, wide_start + wide


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
        for number, (gradient, places) in enumerate(zip(gradients, ctx.places, strict=True)):
            if gradient is not None and ctx.needs_input_grad[2 + number]:
                for axis, channels in places.items():
                    gradient = narrowed(gradient, axis, channels)
                dtype, contiguous = ctx.kinds[number]
                # In the cast at once, and not once more where the gradient is accumulated.
                is_image = gradient.dim() in NHWC and contiguous
                layout = torch.contiguous_format if is_image else torch.preserve_format
                found.append(gradient.to(dtype, memory_format=layout))
            else:
                found.append(None)
        return tuple(found)


class _Crop(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
        ctx.places, ctx.nhwc = {axis: channels}, _is_nhwc(tensor)
        return _cropped(tensor, axis, channels)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return widen([(gradient, ctx.places)], gradient.dtype, nhwc=ctx.nhwc)[0], None, None
