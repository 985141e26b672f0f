"""Convolutions and batch normalisation on images with padded channels, and in NHWC.

Each is a drop-in class for :func:`tilefit.fixes.swap.swap`: parameters and buffers are the module's own. What
arrives says what is to be done: an image of as many channels as the module always had is padded, if the
module works on padded ones, and one that is padded already is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from tilefit.capture.layouts import is_channels_last
from tilefit.fixes.edits import Edits
from tilefit.fixes.padding import working_dtype
from tilefit.fixes.swap import swap
from tilefit.fixes.widening import (
    NHWC,
    Channels,
    narrow,
    real_size,
    spread,
    wide_size,
    widen,
)


def crop_channels(image: torch.Tensor, channels: Channels, dims: int) -> torch.Tensor:
    """The real channels of an image with ``dims`` spatial dimensions; itself if it is not padded."""
    axis = image.dim() - dims - 1
    return image if image.shape[axis] == real_size(channels) else narrow(image, axis, channels)


def cropped(
    module: nn.Module, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Runs a module and crops its output, for :func:`tilefit.fixes.around.around_forward`.

    The module has the attributes ``cropped_channels`` and ``cropped_dims``.
    """
    return crop_channels(forward(*args, **kwargs), module.cropped_channels, module.cropped_dims)  # type: ignore[arg-type]


def is_cropped(module: nn.Module) -> bool:
    """Whether a module was changed to do that."""
    return "cropped_channels" in vars(module)


class Fitted(_ConvNd):
    """A convolution that fits its image, and itself, to the GPU.

    Attributes:
        wide_in, wide_out: How channels lie in the image it reads and in the one it writes; None if they are
            not padded. A depthwise convolution has both or none, and pads no image itself.
        crops: Its output is cropped.
        channels_last: It reads images in NHWC.
    """

    wide_in: Channels | None = None
    wide_out: Channels | None = None
    crops: bool = False
    channels_last: bool = False

    def forward(self, input: torch.Tensor, *output_size: Any) -> torch.Tensor:
        """As the convolution it is, but for the padding of what it writes."""
        dims = len(self.kernel_size)
        x = self._fitted(input)
        padded = x.shape[-dims - 1] != self.in_channels
        depthwise = self.groups > 1
        if not padded and (self.wide_out is None or depthwise):
            unpadded: torch.Tensor = super().forward(x, *output_size)
            return unpadded
        columns = None if depthwise or not padded else self.wide_in
        rows = self.wide_out
        if self.transposed:
            rows, columns = (self.wide_in, None) if depthwise else (columns, rows)
        dtype = working_dtype(x)
        batched = x.dim() == dims + 2
        layout = NHWC[x.dim()] if batched and is_channels_last(x) else torch.preserve_format
        # Cast first: what is padded then is half as large.
        weight = _widened(self.weight.to(dtype, memory_format=layout), rows, columns)
        bias = None if self.bias is None else _widened(self.bias.to(dtype), self.wide_out, None)
        groups = x.shape[-dims - 1] if depthwise else 1
        y = self._convolved(x, weight, bias, groups, *output_size)
        return crop_channels(y, self.wide_out, dims) if self.crops and self.wide_out else y

    def _fitted(self, x: torch.Tensor) -> torch.Tensor:
        """The image with the channels and in the layout that are wanted."""
        dims = len(self.kernel_size)
        if self.channels_last and x.dim() == dims + 2:
            nhwc = NHWC[x.dim()]
            if not x.is_contiguous(memory_format=nhwc):
                x = x.to(working_dtype(x), memory_format=nhwc)
        axis = x.dim() - dims - 1
        if self.wide_in is not None and self.groups == 1 and x.shape[axis] == self.in_channels:
            x = widen(x.to(working_dtype(x)), {axis: self.wide_in})
        return x

    def _convolved(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int
    ) -> torch.Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        function: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        y: torch.Tensor = function(x, weight, bias, self.stride, padding, self.dilation, groups)
        return y

    def extra_repr(self) -> str:
        notes = [super().extra_repr()]  # type: ignore[no-untyped-call]
        if self.wide_in or self.wide_out:
            into = wide_size(self.wide_in) if self.wide_in else self.in_channels
            out = wide_size(self.wide_out) if self.wide_out else self.out_channels
            notes.append(f"computed as {into} to {out} channels")
        if self.channels_last:
            notes.append("on images in NHWC")
        return ", ".join(notes)


class _FittedTransposed(Fitted, _ConvTransposeNd):
    def _convolved(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        groups: int,
        output_size: list[int] | None = None,
    ) -> torch.Tensor:
        dims = len(self.kernel_size)
        geometry: Any = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        output_padding: Any = self._output_padding(x, output_size, *geometry)
        function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        y: torch.Tensor = function(
            x, weight, bias, self.stride, self.padding, output_padding, groups, self.dilation
        )
        return y


def _widened(parameter: torch.Tensor, rows: Channels | None, columns: Channels | None) -> torch.Tensor:
    places = {0: rows} if rows else {}
    if columns:
        places[1] = columns
    return widen(parameter, places)


class FittedConv1d(Fitted, nn.Conv1d):
    """:class:`torch.nn.Conv1d` that fits."""


class FittedConv2d(Fitted, nn.Conv2d):
    """:class:`torch.nn.Conv2d` that fits."""


class FittedConv3d(Fitted, nn.Conv3d):
    """:class:`torch.nn.Conv3d` that fits."""


class FittedConvTranspose1d(_FittedTransposed, nn.ConvTranspose1d):
    """:class:`torch.nn.ConvTranspose1d` that fits."""


class FittedConvTranspose2d(_FittedTransposed, nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d` that fits."""


class FittedConvTranspose3d(_FittedTransposed, nn.ConvTranspose3d):
    """:class:`torch.nn.ConvTranspose3d` that fits."""


#: The fitted class of each plain one.
FITTED: dict[type[nn.Module], type[Fitted]] = {
    nn.Conv1d: FittedConv1d,
    nn.Conv2d: FittedConv2d,
    nn.Conv3d: FittedConv3d,
    nn.ConvTranspose1d: FittedConvTranspose1d,
    nn.ConvTranspose2d: FittedConvTranspose2d,
    nn.ConvTranspose3d: FittedConvTranspose3d,
}


class Wide(_BatchNorm):
    """Batch normalisation that leaves padded channels zero.

    Attributes:
        wide: How the channels lie in a padded image; one that is not padded is normalised as ever.
        crops: Its output is cropped.
    """

    wide: Channels
    crops: bool = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[batch, channels, ...] to the same, running statistics updated."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if input.shape[1] == self.num_features:
            return super().forward(input)
        tracked = not self.training or self.track_running_stats
        running = (self.running_mean, self.running_var) if tracked else (None, None)
        mean, variance, weight, bias = self._widened(*running, self.weight, self.bias)
        of_batch = self.training or self.running_mean is None
        y = F.batch_norm(input, mean, variance, weight, bias, of_batch, self._factor(), self.eps)
        if self.training:
            kept = [vector for vector in running if vector is not None]
            new = [narrow(vector, 0, self.wide) for vector in (mean, variance) if vector is not None]
            if kept:
                with torch.no_grad():
                    torch._foreach_copy_(kept, new)
        return crop_channels(y, self.wide, y.dim() - 2) if self.crops else y

    def _widened(self, *vectors: torch.Tensor | None) -> list[torch.Tensor | None]:
        first = next((vector for vector in vectors if vector is not None), None)
        if first is None:
            return list(vectors)
        sizes = [wide - real for real, wide in self.wide]
        zeros = first.new_zeros(max(sizes))
        gaps = [zeros[:size] for size in sizes] if len(sizes) > 1 else [zeros]
        return [None if vector is None else spread(vector, self.wide, gaps) for vector in vectors]

    def _factor(self) -> float:
        """The weight of this batch in the running statistics, after it has been counted."""
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    def extra_repr(self) -> str:
        own: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{own}, computed on {wide_size(self.wide)} channels"


class WideBatchNorm1d(Wide, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` that keeps padded channels zero."""


class WideBatchNorm2d(Wide, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` that keeps padded channels zero."""


class WideBatchNorm3d(Wide, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` that keeps padded channels zero."""


#: The wide class of each plain one.
WIDE: dict[type[nn.Module], type[Wide]] = {
    nn.BatchNorm1d: WideBatchNorm1d,
    nn.BatchNorm2d: WideBatchNorm2d,
    nn.BatchNorm3d: WideBatchNorm3d,
}


def fit(edits: Edits, module: nn.Module, **attributes: Any) -> None:
    """Give a plain convolution or batch normalisation its fitted class, or a fitted one more to do."""
    fitted = FITTED.get(type(module)) or WIDE.get(type(module))
    if fitted is not None:
        swap(edits, module, fitted, **attributes)
        return
    for name, value in attributes.items():
        edits.set(module, name, value)
