"""Tensors with gaps among their channels.

Channels that stay padded from layer to layer come as segments: ``((60, 64), (30, 32))`` are 60 channels
padded to 64 and, behind them, 30 padded to 32, which is what concatenating two padded images gives.
Parameters keep their real sizes and are copied to their wide places while the model runs.

PyTorch's own functions are put together here, and none is written as a ``torch.autograd.Function``: the
Python of one takes the host longer than all else that a layer does, and a small network waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

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
            tensor = _with_gaps(tensor, axis, channels)
    return torch.constant_pad_nd(tensor, pads) if any(pads) else tensor


def _with_gaps(tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
    starts = accumulate((real for real, _ in channels), initial=0)
    pieces = []
    for start, (real, wide) in zip(starts, channels, strict=False):
        gap = list(tensor.shape)
        gap[axis] = wide - real
        pieces += [tensor.narrow(axis, start, real), tensor.new_zeros(gap)]
    return torch.cat(pieces, axis)


def narrow(tensor: torch.Tensor, axis: int, channels: Channels) -> torch.Tensor:
    """What :func:`widen` put into a dimension; a view if there is but one segment."""
    if len(channels) == 1:
        return tensor.narrow(axis, 0, channels[0][0])
    starts = accumulate((wide for _, wide in channels), initial=0)
    pieces = [tensor.narrow(axis, start, real) for start, (real, _) in zip(starts, channels, strict=False)]
    return torch.cat(pieces, axis)


def spread(vector: torch.Tensor, channels: Channels, gaps: Sequence[torch.Tensor]) -> torch.Tensor:
    """A vector [channels] with the zeros of each gap behind each segment, in one kernel."""
    if len(channels) == 1:
        return torch.cat((vector, gaps[0]))
    pieces: Sequence[torch.Tensor] = torch.split(vector, [real for real, _ in channels])
    return torch.cat([part for pair in zip(pieces, gaps, strict=True) for part in pair])
