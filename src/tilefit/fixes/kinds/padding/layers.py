"""Linear layers, convolutions and what lies between them, on padded features; and on images in NHWC.

To a linear layer features are what channels are to a convolution without spatial dimensions: both are called
channels here. What is padded is handed on within one call of the module whose ``forward`` was traced, and
nowhere else: by itself every module takes and gives the channels it always had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map_only

from tilefit.capture.layouts import is_channels_last
from tilefit.fixes.changes.behaviour import Behaviour, RefusedError, behaviours, require_changeable
from tilefit.fixes.changes.calls import is_transformed, product_dtype
from tilefit.fixes.changes.fix import ChangeSet
from tilefit.fixes.changes.modules import require_plain, require_unparametrized
from tilefit.fixes.changes.region import Opened, Region
from tilefit.fixes.kinds.padding.tensors import (
    NHWC,
    Channels,
    clear,
    crop,
    widen,
)
from tilefit.rules.sites import listed

#: Classes whose instances do just what their class says.
CONVOLUTIONS: frozenset[type[nn.Module]] = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)
_FUNCTIONS: dict[tuple[bool, int], Any] = {
    (False, 1): F.conv1d, (False, 2): F.conv2d, (False, 3): F.conv3d,
    (True, 1): F.conv_transpose1d, (True, 2): F.conv_transpose2d, (True, 3): F.conv_transpose3d,
}  # fmt: skip

Layer = nn.Linear | _ConvNd
#: In a region's space whether what is handed on is padded: the first layer that could do so decides for its
#: call. Where nothing is, what has the padded size is of a wrong size.
_WIDE = "padded channels"


def channels_of(layer: Layer) -> tuple[int, int]:
    """What a layer reads and what it writes."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def dims_of(layer: Layer) -> int:
    """The spatial dimensions behind a layer's channels."""
    return len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0


def _is_handed_on(space: dict[Any, Any] | None, channels: int, wide: Channels | None) -> bool:
    """Whether so many channels are what a layer of the same region has padded."""
    return space is not None and wide is not None and bool(space.get(_WIDE)) and channels == wide[1]


@dataclass(frozen=True)
class Fitted(Behaviour):
    """A linear layer or convolution that fits what it multiplies to the GPU; its parameters keep their sizes.

    Attributes:
        wide_in, wide_out: How channels lie in what it reads and in what it makes of it; None if they are not
            padded.
        takes: The region in which it may be given padded channels; else it pads what it reads itself.
        gives: The region in which it may hand on padded channels; else it crops what it makes.
        dims: Spatial dimensions behind the channels.
        least_rows: With fewer rows than this (the input's sizes but for the channels, multiplied) padding
            costs more than it saves, and the module runs as it always did.
        nhwc: The region in which images are laid out in NHWC.
    """

    wide_in: Channels | None = None
    wide_out: Channels | None = None
    takes: Region | None = None
    gives: Region | None = None
    dims: int = 0
    least_rows: int = 0
    nhwc: Region | None = None
    is_innermost = True

    @staticmethod
    def of(module: nn.Module) -> Fitted | None:
        """What a module does with them, if it does anything."""
        return next((each for each in behaviours(module) if isinstance(each, Fitted)), None)

    def require(self, module: nn.Module, path: str) -> None:
        if self.nhwc is None:
            require_plain(module, path, type(module) if self.dims else nn.Linear)
            return
        if not isinstance(module, _ConvNd):
            where = path or "the model"
            raise RefusedError(f"{where} is no convolution, and computes one with filters it holds")
        require_unparametrized(module, path)
        require_changeable(module, path)

    def beside(self, module: nn.Module) -> tuple[Behaviour, Behaviour | None]:
        old = Fitted.of(module)
        if old is None:
            return self, None
        return (replace(self, nhwc=old.nhwc) if self.nhwc is None else replace(old, nhwc=self.nhwc)), old

    def along(self, other: Fitted) -> Fitted:
        """This, taking and giving what another does, too."""
        return replace(self, takes=other.takes or self.takes, gives=other.gives or self.gives)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the layer it is; what it reads and writes may be padded in a region."""
        assert isinstance(module, Layer)
        if self.wide_in is self.wide_out is None and not self._computes(module):
            dims = dims_of(module)
            if self._wants_nhwc(dims):
                args = tuple(_in_nhwc(each, dims + 2) for each in args)
            return forward(*args, **kwargs)
        return self._fitted(module, forward, *args, **kwargs)

    def _fitted(
        self, module: Layer, forward: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        weight: Any = module.weight
        bias: Any = module.bias
        dtype, dims = product_dtype(input, weight, bias), dims_of(module)
        axis = input.dim() - dims - 1
        if dtype is None or axis < 0 or (dims and axis > 1) or is_transformed():
            return forward(input, *args, **kwargs)
        wide_in, wide_out = self.wide_in, self.wide_out
        taken, given = (None if each is None else each.space() for each in (self.takes, self.gives))
        channels, real = input.shape[axis], channels_of(module)
        is_wide, is_real = _is_handed_on(taken, channels, wide_in), channels == real[0]
        is_enough = input.numel() >= self.least_rows * channels
        pays = is_wide or (is_real and self._pays(is_enough, taken, given))
        if not pays or not self._fits(module, *real):
            # Somebody has given it a weight of another size: it is to see what it always saw.
            input = crop(input, axis, wide_in) if is_wide and wide_in is not None else input
            wide_in = wide_out = None
        is_nhwc = bool(dims and axis) and self._wants_nhwc(dims)
        if wide_in is wide_out is None and not (is_real and is_nhwc):
            return forward(input, *args, **kwargs)
        is_nhwc = is_nhwc or (bool(dims and axis) and is_channels_last(input))
        places = (wide_in, wide_out)
        x, weight, bias = _padded(module, input, dtype, is_nhwc=is_nhwc, is_wide=is_wide, places=places)
        y = _product(module, x, weight, bias, *args, **kwargs)
        if wide_out is None:
            return y
        if given is None or not given.setdefault(_WIDE, True):
            return crop(y, axis, wide_out)
        clear(y, axis, wide_out)
        return y

    def _pays(self, is_enough: bool, taken: Any, given: Any) -> bool:
        """Whether to pad what is not padded yet; ``is_enough``: it is worth that by itself."""
        if given is not None:
            return bool(given.setdefault(_WIDE, is_enough))
        # Where channels were to be handed on and are not, nobody knows what padding is worth.
        is_alone = taken is None and (self.takes is not None or self.gives is not None)
        return is_enough and (not is_alone or torch.compiler.is_compiling())

    def _computes(self, module: Layer) -> bool:
        """Whether its filters are laid out here where nothing is padded: for the compiler, which makes one
        kernel of that and their cast. Else PyTorch does, whose host takes less time for it than Python."""
        return torch.compiler.is_compiling() and type(module) in CONVOLUTIONS

    def _wants_nhwc(self, dims: int) -> bool:
        if self.nhwc is None or dims + 2 not in NHWC:
            return False
        if torch.compiler.is_compiling():
            return not is_transformed()
        return self.nhwc.space() is not None

    def _fits(self, module: Layer, into: int, out: int) -> bool:
        """Whether the layer has the channels it had."""
        into = into if self.wide_in is None else self.wide_in[0]
        out = out if self.wide_out is None else self.wide_out[0]
        is_transposed = isinstance(module, _ConvNd) and module.transposed
        return module.weight.shape[:2] == ((into, out) if is_transposed else (out, into))


def _padded(
    module: Layer,
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    is_nhwc: bool,
    is_wide: bool,
    places: tuple[Channels | None, Channels | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What is read, the weight and the bias as they are multiplied."""
    wide_in, wide_out = places
    pads_x = wide_in is not None and not is_wide
    if is_nhwc and not pads_x and not x.is_contiguous(memory_format=NHWC[x.dim()]):
        x = x.to(dtype, memory_format=NHWC[x.dim()])
    weight, bias = module.weight, module.bias
    of_weight = (wide_out, wide_in)
    if isinstance(module, _ConvNd):
        of_weight = (wide_in, wide_out) if module.transposed else of_weight
    wide = {at: channels for at, channels in enumerate(of_weight) if channels}
    if not wide:
        return x, weight.to(dtype, memory_format=NHWC[x.dim()]), bias
    parts = [(weight, wide)]
    watched = [weight] if x.requires_grad else []
    if bias is not None and wide_out is not None:
        parts.append((bias, {0: wide_out}))
    if pads_x and wide_in is not None:
        parts.append((x, {x.dim() - dims_of(module) - 1: wide_in}))
        # Of rows that do not lie one behind the other PyTorch multiplies a copy, too.
        is_kept = isinstance(module, _ConvNd) or x.dim() < 3 or x.is_contiguous()
        watched += [x] if weight.requires_grad and is_kept else []
    made = widen(parts, dtype, nhwc=is_nhwc, watched=watched)
    if bias is not None and wide_out is not None:
        bias = made[1]
    return made[-1] if pads_x else x, made[0], bias


def _product(
    module: Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output_size: list[int] | None = None,
) -> torch.Tensor:
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    dims = len(module.kernel_size)
    function = _FUNCTIONS[module.transposed, dims]
    padding: Any = module.padding
    if module.transposed:
        geometry: Any = (module.stride, padding, module.kernel_size, dims, module.dilation)
        output_padding: Any = module._output_padding(x, output_size, *geometry)  # type: ignore[operator]
        y = function(x, weight, bias, module.stride, padding, output_padding, module.groups, module.dilation)
    else:
        if module.padding_mode != "zeros":
            x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
        y = function(x, weight, bias, module.stride, padding, module.dilation, module.groups)
    return y  # type: ignore[no-any-return]


def by_itself(layer: Layer, sizes: Mapping[int, int], inputs: Mapping[int, int]) -> Fitted | None:
    """A layer that pads what it reads (channels of ``inputs``) and crops what it writes (those of ``sizes``);
    None where it has none of them."""
    into, out = channels_of(layer)
    wide_in, wide_out = _wide(into, inputs), _wide(out, sizes)
    if wide_in is wide_out is None:
        return None
    return Fitted(wide_in, wide_out, dims=dims_of(layer))


def _wide(channels: int, sizes: Mapping[int, int]) -> Channels | None:
    wide = sizes.get(channels, channels)
    return (channels, wide) if wide > channels else None


# ---- the changes -------------------------------------------------------------------------------


def padded(wides: Mapping[str, Fitted], sizes: Mapping[int, int], host_s: float = 0.0) -> ChangeSet:
    """The change that pads numbers of channels in layers that have them.

    Args:
        wides: What each module has to do, by path.
        sizes: The numbers, each with what it is padded to.
        host_s: Of the change.
    """
    paths = tuple(wides)
    *many, last = [f"{old} to {new}" for old, new in sizes.items()] or [""]
    pairs = f"{', '.join(many)} and {last}" if many else last
    if any(wide.dims for wide in wides.values()):
        words = f"Pad {pairs} channels in {paths[0] if len(paths) == 1 else f'{len(paths)} modules'}."
    else:
        between = ", and what passes between them" if any(each.gives for each in wides.values()) else ""
        layers = listed(paths, "linear layers")
        words = f"Pad the product of {layers}{between}, from {pairs} features."
    return ChangeSet(paths, behaviours=tuple(wides.items()), words=words, host_s=host_s)


def in_channels_last(modules: Sequence[str], host_s: float = 0.0) -> ChangeSet:
    """The change of convolutions that read and write their images in NHWC."""
    words = f"Run {len(modules)} convolutions on images in NHWC."
    region: Any = Opened("", ContiguousOutside)
    return ChangeSet.giving(modules, Fitted(nhwc=region), words, host_s=host_s)


# ---- images in NHWC ----------------------------------------------------------------------------


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
        return tree_map_only(torch.Tensor, _turned_back, result)


def _is_turned(tensor: torch.Tensor) -> bool:
    return tensor.dim() in NHWC and not tensor.is_contiguous() and is_channels_last(tensor)


def _turned_back(leaf: torch.Tensor) -> torch.Tensor:
    # What is a view of something else was not made by a convolution.
    is_view = not torch.compiler.is_compiling() and leaf._is_view()
    return leaf.contiguous() if not is_view and _is_turned(leaf) else leaf
