"""Linear layers and convolutions on padded features, and convolutions on images in NHWC.

To a linear layer features are what channels are to a convolution without spatial dimensions: both are called
channels here. Every module takes and gives the channels it always had.
"""

from __future__ import annotations

import threading
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
from tilefit.fixes.changes.calls import is_transformed, packing, product_dtype
from tilefit.fixes.changes.fix import ChangeSet
from tilefit.fixes.changes.modules import require_plain, require_unparametrized
from tilefit.fixes.kinds.padding.tensors import NHWC, crop, widen

#: Classes whose instances do just what their class says.
CONVOLUTIONS: frozenset[type[nn.Module]] = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)

Layer = nn.Linear | _ConvNd


def channels_of(layer: Layer) -> tuple[int, int]:
    """What a layer reads and what it writes."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


@dataclass(frozen=True)
class Fitted(Behaviour):
    """A linear layer or convolution that multiplies padded channels; its parameters keep their sizes.

    Attributes:
        into, out: Channels of what it multiplies and of what it makes of it: those of the layer, or more.
        least_rows: With fewer rows than this (the input's sizes but for the channels, multiplied) padding
            costs more than it saves, and the module runs as it always did.
    """

    into: int
    out: int
    least_rows: int = 0
    is_innermost = True

    def require(self, module: nn.Module, path: str) -> None:
        require_plain(module, path, type(module) if isinstance(module, _ConvNd) else nn.Linear)

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """As the layer it is."""
        assert isinstance(module, Layer)
        weight: Any = module.weight
        bias: Any = module.bias
        real = channels_of(module)
        into, out = (real[0], self.into), (real[1], self.out)
        is_transposed = isinstance(module, _ConvNd) and module.transposed
        dims = len(module.kernel_size) if isinstance(module, _ConvNd) else 0
        sides = (into, out) if is_transposed else (out, into)
        dtype, axis = product_dtype(input, weight, bias), input.dim() - dims - 1
        is_known = not is_transformed() and (is_transposed or not (args or kwargs))
        is_known = is_known and (axis in (0, 1) if dims else axis >= 0)
        is_sized = (
            is_known and input.shape[axis] == into[0] and weight.shape[:2] == (sides[0][0], sides[1][0])
        )
        if dtype is None or not is_sized or input.numel() < self.least_rows * into[0]:
            return forward(input, *args, **kwargs)
        parts = [(weight, {0: sides[0], 1: sides[1]})]
        watched = [weight] if input.requires_grad else []
        if is_biased := bias is not None and out[0] < out[1]:
            parts.append((bias, {0: out}))
        if is_copied := into[0] < into[1]:
            parts.append((input, {axis: into}))
            # Of rows that do not lie one behind the other PyTorch multiplies a copy, too.
            is_kept = dims or input.dim() < 3 or input.is_contiguous()
            watched += [input] if weight.requires_grad and is_kept else []
        is_nhwc = bool(dims and axis) and is_channels_last(input)
        weight, *made = widen(parts, dtype, nhwc=is_nhwc, watched=watched)
        # By their places: older versions of Dynamo take a list that was unpacked for a tuple.
        x = made[-1] if is_copied else input
        y = _product(module, x, weight, made[0] if is_biased else bias, *args, **kwargs)
        return crop(y, axis, out)


def _product(
    module: Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output_size: list[int] | None = None,
) -> torch.Tensor:
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    if not module.transposed:
        return module._conv_forward(x, weight, bias)
    dims, padding = len(module.kernel_size), module.padding
    geometry: Any = (module.stride, padding, module.kernel_size, dims, module.dilation)
    output_padding: Any = module._output_padding(x, output_size, *geometry)  # type: ignore[operator]
    function: Any = getattr(F, f"conv_transpose{dims}d")
    more = (module.stride, padding, output_padding, module.groups, module.dilation)
    return function(x, weight, bias, *more)  # type: ignore[no-any-return]


def refitted(layer: Layer, sizes: Mapping[int, int], inputs: Mapping[int, int]) -> Fitted | None:
    """A layer that pads what it reads (channels of ``inputs``) and crops what it writes (those of ``sizes``),
    beside what it pads now; None where that is all."""
    into, out = channels_of(layer)
    now = next((each for each in behaviours(layer) if isinstance(each, Fitted)), Fitted(into, out))
    wide = replace(now, into=inputs.get(into, now.into), out=sizes.get(out, now.out))
    return None if wide == now else wide


def padded(wides: Mapping[str, Fitted], words: str, host_s: float = 0.0) -> ChangeSet:
    """The change that pads channels in the modules of these paths."""
    return ChangeSet(tuple(wides), behaviours=tuple(wides.items()), words=words, host_s=host_s)


# ---- images in NHWC ----------------------------------------------------------------------------


class _Here(threading.local):
    """Of each call of such a model that this thread is in, what hooked saved tensors when it began."""

    def __init__(self) -> None:
        self.packing: list[Any] = []


_here = _Here()


@dataclass(frozen=True)
class InChannelsLast(Behaviour):
    """A convolution that is given its images in NHWC within a call of the model; PyTorch lays out its filters
    alike. Where it is checkpointed within the call it runs as it was: what is computed anew in the backward
    pass is computed outside of it, and has to save the same tensors."""

    def require(self, module: nn.Module, path: str) -> None:
        require_convolution(module, path)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert isinstance(module, _ConvNd)
        dims = len(module.kernel_size) + 2
        # The compiler is told first: it need not look at what is a thread's own.
        is_within = torch.compiler.is_compiling() or _here.packing[-1:] == [packing()]
        if dims in NHWC and is_within and not is_transformed():
            args = tuple(_in_nhwc(each, dims) for each in args)
        return forward(*args, **kwargs)


def in_channels_last(modules: Sequence[str], host_s: float = 0.0) -> ChangeSet:
    """The change of convolutions that read and write their images in NHWC."""
    behaviours = *((path, InChannelsLast()) for path in modules), ("", ContiguousOutside())
    words = f"Run {len(modules)} convolutions on images in NHWC."
    return ChangeSet(tuple(modules), behaviours=behaviours, words=words, host_s=host_s)


def require_convolution(module: nn.Module, path: str) -> None:
    """Check that a module is one with filters of its own.

    Raises:
        RefusedError: it is not.
    """
    if not isinstance(module, _ConvNd):
        where = path or "the model"
        raise RefusedError(f"{where} is no convolution, and computes one with filters it holds")
    require_unparametrized(module, path)
    require_changeable(module, path)


def _in_nhwc(value: Any, dims: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() != dims:
        return value
    is_so = value.is_contiguous(memory_format=NHWC[dims]) or is_channels_last(value)
    return value if is_so else value.contiguous(memory_format=NHWC[dims])


@dataclass(frozen=True)
class ContiguousOutside(Behaviour):
    """A model in whose calls images are laid out in NHWC; who gave none in NHWC gets none."""

    def require(self, module: nn.Module, path: str) -> None:
        require_changeable(module, path)  # some of its convolutions may be laid out already

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        compiles = torch.compiler.is_compiling()
        result = forward(*args, **kwargs) if compiles else _within(forward, args, kwargs)
        if any(isinstance(each, torch.Tensor) and _is_turned(each) for each in tree_leaves((args, kwargs))):
            return result
        return tree_map_only(torch.Tensor, _turned_back, result)


def _within(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _here.packing.append(packing())
    try:
        return forward(*args, **kwargs)
    finally:
        _here.packing.pop()


def _is_turned(tensor: torch.Tensor) -> bool:
    return tensor.dim() in NHWC and not tensor.is_contiguous() and is_channels_last(tensor)


def _turned_back(leaf: torch.Tensor) -> torch.Tensor:
    # What is a view of something else was not made by a convolution.
    is_view = not torch.compiler.is_compiling() and leaf._is_view()
    return leaf.contiguous() if not is_view and _is_turned(leaf) else leaf
