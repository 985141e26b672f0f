"""Tensors with gaps among their channels.

Channels that stay padded from layer to layer come as segments: ``((60, 64), (30, 32))`` are 60 channels
padded to 64 and, behind them, 30 padded to 32, which is what concatenating two padded images gives.
Parameters keep their real sizes and are copied to their wide places while the model runs.

PyTorch's own functions are put together here, and none is written as a ``torch.autograd.Function``: one of
those costs the host some 200 µs, forward and backward, as much as all else that a layer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

#: Segments of channels, each as (channels, channels with the padding behind them).
Channels = tuple[tuple[int, int], ...]

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


def widen(tensor: torch.Tensor, places: dict[int, Channels]) -> torch.Tensor:
    """A tensor with zeros between and behind its channels.

    Args:
        tensor: Of any shape.
        places: How the elements of a dimension (not negative) lie afterwards; others stay as they are.
    """
    pads = [0] * (2 * tensor.dim())
    for axis, channels in places.items():
        if len(channels) == 1:
            ((real, wide),) = channels
            pads[-2 * axis - 1] = wide - real
        else:
            tensor = torch.cat(list(_with_zeros(tensor, axis, channels)), axis)
    return torch.constant_pad_nd(tensor, pads) if any(pads) else tensor


def _with_zeros(tensor: torch.Tensor, axis: int, channels: Channels) -> Iterator[torch.Tensor]:
    start = 0
    for real, wide in channels:
        yield tensor.narrow(axis, start, real)
        yield tensor.new_zeros((*tensor.shape[:axis], wide - real, *tensor.shape[axis + 1 :]))
        start += real


def narrow(tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
    """What :func:`widen` put into a dimension; a view if there is but one segment."""
    pieces = []
    start = 0
    for real, wide in channels:
        pieces.append(tensor.narrow(axis, start, real))
        start += wide
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def spread(vectors: list[torch.Tensor], channels: Channels, zeros: torch.Tensor) -> torch.Tensor:
    """Vectors, widened and behind one another, in one kernel.

    Args:
        vectors: [channels] each.
        channels: How each lies afterwards.
        zeros: As many as the longest gap.
    """
    pieces = []
    for vector in vectors:
        start = 0
        for real, wide in channels:
            pieces += [vector[start : start + real], zeros[: wide - real]]
            start += real
    return torch.cat(pieces)
