"""Tensors with gaps among their channels.

Channels that stay padded from layer to layer come as segments: ``((60, 64), (30, 32))`` are 60 channels
padded to 64 and, behind them, 30 padded to 32, which is what concatenating two padded images gives.
Parameters keep their real sizes and are copied into their wide places while the model runs, cast on the way
as autocast would cast them anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch.autograd import Function

from tilefit.capture.layouts import is_channels_last

#: Segments of channels, each as (channels, channels with the padding behind them).
Channels = tuple[tuple[int, int], ...]

#: For each dimension of a tensor how its elements lie in the wide one; None where that is as they were.
Places = tuple[Channels | None, ...]

NHWC = {4: torch.channels_last, 5: torch.channels_last_3d}


def real_size(channels: Channels) -> int:
    """The channels themselves."""
    return sum(real for real, _ in channels)


def wide_size(channels: Channels) -> int:
    """The channels with their padding."""
    return sum(wide for _, wide in channels)


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
    tensors: Sequence[torch.Tensor],
    places: Sequence[Places],
    dtype: torch.dtype,
    channels_last: bool = False,
) -> tuple[torch.Tensor, ...]:
    """New tensors in ``dtype`` that hold the given ones in their places and zeros elsewhere.

    Several share one memory, so that one kernel writes all their zeros.

    Args:
        tensors: Of any shapes.
        places: For each of them.
        dtype: Element type of the results.
        channels_last: Images and filters (4 or 5 dimensions) are laid out in NHWC.
    """
    return _Widen.apply(tuple(places), dtype, channels_last, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def narrow(tensor: torch.Tensor, places: Places) -> torch.Tensor:
    """What :func:`widen` put into a tensor; a view where no dimension has more than one segment."""
    for axis, channels in enumerate(places):
        if channels is not None:
            pieces = [tensor.narrow(axis, start, size) for _, start, size in _pieces(channels)]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
    return tensor


def _pieces(channels: Channels) -> Iterator[tuple[int, int, int]]:
    """Where each segment begins among the real channels and among the wide ones, and its size."""
    start = wide_start = 0
    for real, wide in channels:
        yield start, wide_start, real
        start, wide_start = start + real, wide_start + wide


def _gaps(channels: Channels) -> Iterator[tuple[int, int]]:
    """Where the padding of each segment begins, and its size."""
    start = 0
    for real, wide in channels:
        if real != wide:
            yield start + real, wide - real
        start += wide


def _wide_shape(tensor: torch.Tensor, places: Places) -> list[int]:
    return [
        size if channels is None else wide_size(channels)
        for size, channels in zip(tensor.shape, places, strict=True)
    ]


def _strides(shape: Sequence[int], channels_last: bool) -> list[int]:
    """Of packed memory."""
    axes = list(range(len(shape)))
    if channels_last and len(shape) in NHWC:
        axes.append(axes.pop(1))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= shape[axis]
    return strides


def _copies(
    wide: torch.Tensor, tensor: torch.Tensor, places: Places
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of ``wide`` and the parts of ``tensor`` that belong there."""
    padded = [axis for axis, channels in enumerate(places) if channels is not None]
    for pieces in product(*(list(_pieces(channels)) for channels in places if channels is not None)):
        to, part = wide, tensor
        for axis, (start, wide_start, size) in zip(padded, pieces, strict=True):
            to, part = to.narrow(axis, wide_start, size), part.narrow(axis, start, size)
        yield to, part


class _Widen(Function):
    @staticmethod
    def forward(
        places: Sequence[Places], dtype: torch.dtype, channels_last: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        shapes = [_wide_shape(tensor, where) for tensor, where in zip(tensors, places, strict=True)]
        memory = tensors[0].new_empty(sum(map(prod, shapes)), dtype=dtype)
        start = 0
        wide = []
        for shape in shapes:
            wide.append(memory.as_strided(shape, _strides(shape, channels_last), start))
            start += prod(shape)
        gaps = [(axis, gap) for axis, channels in enumerate(places[0]) for gap in _gaps(channels or ())]
        if len(tensors) == len(gaps) == 1:  # an image, perhaps a large one
            ((axis, gap),) = gaps
            wide[0].narrow(axis, *gap).zero_()
        else:
            memory.zero_()
        copies = [pair for each in zip(wide, tensors, places, strict=True) for pair in _copies(*each)]
        if all(to.dim() == 1 and to.dtype == part.dtype for to, part in copies):
            torch._foreach_copy_([to for to, _ in copies], [part for _, part in copies])
        else:
            for to, part in copies:
                to.copy_(part)
        return tuple(wide)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        places, _, _, *tensors = inputs
        ctx.places = places
        ctx.kinds = [(tensor.dtype, is_channels_last(tensor)) for tensor in tensors]
        ctx.mark_non_differentiable(
            *(wide for wide, tensor in zip(output, tensors, strict=True) if not tensor.requires_grad)
        )
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found: list[torch.Tensor | None] = []
        for gradient, places, (dtype, channels_last) in zip(gradients, ctx.places, ctx.kinds, strict=True):
            if gradient is None:
                found.append(None)
                continue
            memory_format = NHWC[gradient.dim()] if channels_last else torch.contiguous_format
            found.append(narrow(gradient, places).to(dtype, memory_format=memory_format))
        return None, None, None, *found
