"""Convolutions and what lies between them, on images with padded channels and in NHWC.

What is padded is handed on within one call of the module whose ``forward`` was traced, and nowhere else: by
itself every module takes and gives the channels it always had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from tilefit.capture.layouts import is_channels_last
from tilefit.fixes.behaviour import Behaviour
from tilefit.fixes.calls import is_transformed, product_dtype
from tilefit.fixes.padding import (
    NHWC,
    Channels,
    crop,
    narrowed,
    real_size,
    spread,
    wide_size,
    widen,
)
from tilefit.fixes.region import Region

#: Classes whose instances do just what their class says.
CONVOLUTIONS: frozenset[type[nn.Module]] = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)
NORMS: frozenset[type[nn.Module]] = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
_FUNCTIONS: dict[tuple[bool, int], Any] = {
    (False, 1): F.conv1d, (False, 2): F.conv2d, (False, 3): F.conv3d,
    (True, 1): F.conv_transpose1d, (True, 2): F.conv_transpose2d, (True, 3): F.conv_transpose3d,
}  # fmt: skip

#: In a region's space where an image was handed on padded: others of that size are of a wrong size.
_WIDE = "padded channels"


def _is_handed_on(space: dict[Any, Any] | None, channels: int, wide: Channels | None) -> bool:
    """Whether an image of so many channels is one that a convolution of the same region has padded."""
    return space is not None and wide is not None and channels == wide_size(wide) and _WIDE in space


@dataclass(frozen=True)
class Convolution(Behaviour):
    """A convolution that fits its image, and its filters, to the GPU.

    Attributes:
        wide_in, wide_out: How channels lie in the image it reads and in the one it writes; None if they are
            not padded. A depthwise convolution has both or none, and pads no image itself.
        crops: What it writes is cropped in the region, too.
        inside: The region in which images are handed on padded; None if it pads and crops by itself.
        nhwc: The region in which images are laid out in NHWC.
        takes: In the region it may be given a padded image; else it pads what it reads itself.
    """

    is_innermost = True

    wide_in: Channels | None = None
    wide_out: Channels | None = None
    crops: bool = True
    inside: Region | None = None
    nhwc: Region | None = None
    takes: bool = False

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the convolution it is, but for the padding of what it writes."""
        assert isinstance(module, _ConvNd)
        if self.wide_in is self.wide_out is None and not self._computes(module):
            dims = len(module.kernel_size)
            if self._wants_nhwc(dims):
                args = tuple(_in_nhwc(each, dims + 2) for each in args)
            return forward(*args, **kwargs)
        return self._fitted(module, forward, *args, **kwargs)

    def _fitted(
        self, module: _ConvNd, forward: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        dtype = product_dtype(input, module.weight, module.bias)
        dims = len(module.kernel_size)
        axis = input.dim() - dims - 1
        if dtype is None or axis not in (0, 1) or is_transformed():
            return forward(input, *args, **kwargs)
        channels, wide_in, wide_out = input.shape[axis], self.wide_in, self.wide_out
        space = None if self.inside is None else self.inside.space()
        is_open = space is not None
        is_wide = self.takes and _is_handed_on(space, channels, wide_in)
        if not self._pads(module, channels, is_open, is_wide):
            wide_in = wide_out = None
        is_nhwc = axis == 1 and self._wants_nhwc(dims)
        if wide_in is wide_out is None and (channels != module.in_channels or not is_nhwc):
            return forward(input, *args, **kwargs)
        is_nhwc = is_nhwc or (axis == 1 and is_channels_last(input))
        places = (wide_in, wide_out)
        x, weight, bias = _padded(module, input, dtype, is_nhwc=is_nhwc, is_wide=is_wide, places=places)
        groups = x.shape[axis] if module.groups > 1 and wide_in else module.groups
        y = _convolved(module, x, weight, bias, groups, *args, **kwargs)
        if wide_out is not None and (self.crops or space is None):
            return crop(y, axis, wide_out)
        if wide_out is not None and space is not None:
            space[_WIDE] = True
        return y

    def _pads(self, module: _ConvNd, channels: int, is_open: bool, is_wide: bool) -> bool:
        if is_wide:
            return self._fits(module)
        if channels != module.in_channels or module.groups > 1:
            return False
        is_allowed = is_open or self.inside is None or torch.compiler.is_compiling()
        return is_allowed and self._fits(module)

    def _computes(self, module: _ConvNd) -> bool:
        """Whether its filters are laid out here where nothing is padded: for the compiler, which makes one
        kernel of that and their cast. Else PyTorch does, whose host takes less time for it than Python."""
        return torch.compiler.is_compiling() and type(module) in CONVOLUTIONS

    def _wants_nhwc(self, dims: int) -> bool:
        if self.nhwc is None or dims + 2 not in NHWC:
            return False
        if torch.compiler.is_compiling():
            return not is_transformed()
        return self.nhwc.space() is not None

    def _fits(self, module: _ConvNd) -> bool:
        """Whether the convolution has the channels it had."""
        into = module.in_channels if self.wide_in is None else real_size(self.wide_in)
        out = module.out_channels if self.wide_out is None else real_size(self.wide_out)
        groups = module.groups
        return module.weight.shape[:2] == (
            (into, out // groups) if module.transposed else (out, into // groups)
        )


def _padded(
    module: _ConvNd,
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    is_nhwc: bool,
    is_wide: bool,
    places: tuple[Channels | None, Channels | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The image, the filters and the bias as they are multiplied."""
    wide_in, wide_out = places
    axis = x.dim() - len(module.kernel_size) - 1
    pads_image = wide_in is not None and not is_wide
    if is_nhwc and not pads_image and not x.is_contiguous(memory_format=NHWC[x.dim()]):
        x = x.to(dtype, memory_format=NHWC[x.dim()])
    weight, bias = module.weight, module.bias
    of_filters = (wide_in, wide_out) if module.transposed else (wide_out, wide_in)
    if module.groups > 1:
        of_filters = (of_filters[0], None)
    wide = {at: channels for at, channels in enumerate(of_filters) if channels}
    if not wide:
        return x, weight.to(dtype, memory_format=NHWC[x.dim()]), bias
    parts = [(weight, wide)]
    if bias is not None and wide_out is not None:
        parts.append((bias, {0: wide_out}))
    if pads_image and wide_in is not None:
        parts.append((x, {axis: wide_in}))
    made = widen(parts, dtype, nhwc=is_nhwc, watched=x.requires_grad)
    if bias is not None and wide_out is not None:
        bias = made[1]
    return made[-1] if pads_image else x, made[0], bias


def _convolved(
    module: _ConvNd,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    output_size: list[int] | None = None,
) -> torch.Tensor:
    dims = len(module.kernel_size)
    function = _FUNCTIONS[module.transposed, dims]
    padding: Any = module.padding
    if module.transposed:
        geometry: Any = (module.stride, padding, module.kernel_size, dims, module.dilation)
        output_padding: Any = module._output_padding(x, output_size, *geometry)  # type: ignore[operator]
        y = function(x, weight, bias, module.stride, padding, output_padding, groups, module.dilation)
    else:
        if module.padding_mode != "zeros":
            x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
        y = function(x, weight, bias, module.stride, padding, module.dilation, groups)
    return y  # type: ignore[no-any-return]


@dataclass(frozen=True)
class WideNorm(Behaviour):
    """Batch normalisation that leaves padded channels zero.

    Attributes:
        wide: How the channels lie in a padded image.
        crops: Its output is cropped.
        inside: The region in which images are padded.
    """

    is_innermost = True

    wide: Channels
    crops: bool
    inside: Region

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: torch.Tensor) -> Any:
        """[batch, channels, ...] to the same, running statistics updated."""
        assert isinstance(module, _BatchNorm)
        if input.dim() < 2 or not _is_handed_on(self.inside.space(), input.shape[1], self.wide):
            return forward(input)
        module._check_input_dim(input)  # type: ignore[no-untyped-call]
        tracked = not module.training or module.track_running_stats
        running = (module.running_mean, module.running_var) if tracked else (None, None)
        mean, variance, weight, bias = self._widened(*running, module.weight, module.bias)
        of_batch = module.training or module.running_mean is None
        y = F.batch_norm(input, mean, variance, weight, bias, of_batch, _factor(module), module.eps)
        if module.training:
            kept = [vector for vector in running if vector is not None]
            new = [narrowed(vector, 0, self.wide) for vector in (mean, variance) if vector is not None]
            if kept:
                with torch.no_grad():
                    torch._foreach_copy_(kept, new)
        return crop(y, 1, self.wide) if self.crops else y

    def _widened(self, *vectors: torch.Tensor | None) -> list[torch.Tensor | None]:
        first = next((vector for vector in vectors if vector is not None), None)
        if first is None:
            return list(vectors)
        sizes = [wide - real for real, wide in self.wide]
        zeros = first.new_zeros(max(sizes))
        gaps = [zeros[:size] for size in sizes] if len(sizes) > 1 else [zeros]
        return [None if vector is None else spread(vector, self.wide, gaps) for vector in vectors]


def _factor(module: _BatchNorm) -> float:
    """The weight of this batch in the running statistics, after it has been counted."""
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return 1.0 / float(module.num_batches_tracked)
    return module.momentum or 0.0


@dataclass(frozen=True)
class Cropped(Behaviour):
    """A module whose image is handed on without the padding it is given.

    Attributes:
        channels: How the channels lie in a padded image of ``dims`` spatial dimensions.
        inside: The region in which images are padded.
    """

    channels: Channels
    dims: int
    inside: Region

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        y, space = forward(*args, **kwargs), self.inside.space()
        axis = y.dim() - self.dims - 1 if isinstance(y, torch.Tensor) else -1
        is_wide = axis >= 0 and _is_handed_on(space, y.shape[axis], self.channels)
        return crop(y, axis, self.channels) if is_wide else y


def _in_nhwc(value: Any, dims: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() != dims:
        return value
    is_so = value.is_contiguous(memory_format=NHWC[dims]) or is_channels_last(value)
    return value if is_so else value.contiguous(memory_format=NHWC[dims])


@dataclass(frozen=True, eq=False)
class ContiguousOutside(Region):
    """The region of a model in which images are laid out in NHWC; who gave none in NHWC gets none."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(module, forward, *args, **kwargs)
        if any(isinstance(each, torch.Tensor) and _is_turned(each) for each in tree_leaves((args, kwargs))):
            return result
        return tree_map(_turned_back, result)


def _is_turned(tensor: torch.Tensor) -> bool:
    return tensor.dim() in NHWC and not tensor.is_contiguous() and is_channels_last(tensor)


def _turned_back(leaf: Any) -> Any:
    # What is a view of something else was not made by a convolution.
    is_view = not torch.compiler.is_compiling() and isinstance(leaf, torch.Tensor) and leaf._is_view()
    is_ours = isinstance(leaf, torch.Tensor) and not is_view and _is_turned(leaf)
    return leaf.contiguous() if is_ours else leaf
