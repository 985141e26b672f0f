"""Pad the products of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.cost import estimate
from tilefit.fixes.behaviour import Behaviour, behaviours
from tilefit.fixes.calls import is_transformed, product_dtype
from tilefit.fixes.chains import chains
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.interior import regions_of
from tilefit.fixes.modules import fewest_rows, require_plain, submodule
from tilefit.fixes.padding import LAYER_S, REGION_S, Places, crop, widen
from tilefit.fixes.region import Region
from tilefit.fixes.run import Run
from tilefit.ops import FORWARD, Gemm, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.alignment.features import Group, groups
from tilefit.rules.alignment.padding import misaligned_operands
from tilefit.rules.layers import Linear, weight
from tilefit.rules.sites import listed

#: With few rows a layer is padded only where it clearly pays: the times of small products are the least sure.
_CLEAR = 0.2


#: Whether what is handed on in a region is padded: the first layer that could do so decides for its call.
_WIDE = "padded features"


@dataclass(frozen=True)
class PaddedProduct(Behaviour):
    """A linear layer that multiplies matrices of padded sizes; its parameters keep theirs.

    Attributes:
        sizes: (out_features, in_features) of the layer.
        padded: Those of the product.
        least_rows: With fewer rows than this (the input's sizes but the last, multiplied) padding costs more
            than it saves, and the layer runs as it always did.
        takes: The region in which it may be given padded features.
        gives: The region in which it may hand on padded features.
    """

    is_innermost = True

    sizes: tuple[int, int]
    padded: tuple[int, int]
    least_rows: int
    takes: Region | None = None
    gives: Region | None = None

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: torch.Tensor) -> Any:
        """[..., in_features] to [..., out_features]; either may be padded in a region."""
        weight: Any = module.weight
        bias: Any = module.bias
        (rows, columns), (wide_rows, wide_columns) = self.sizes, self.padded
        dtype = product_dtype(input, weight, bias)
        if dtype is None or is_transformed() or weight.shape != self.sizes:
            return forward(input)
        features = input.shape[-1] if input.shape else 0
        taken = None if self.takes is None else self.takes.space()
        space = None if self.gives is None else self.gives.space()
        is_wide = features == wide_columns != columns
        if is_wide and taken is not None and taken.get(_WIDE):
            keeps = space is not None and space.setdefault(_WIDE, True)
        else:
            is_wide = False
            if features != columns or not self._pays(input, taken, space):
                return forward(input)
            keeps = space is not None
        parts: list[tuple[torch.Tensor, Places]] = [
            (weight, {0: ((rows, wide_rows),), 1: ((columns, wide_columns),)})
        ]
        if bias is not None and wide_rows != rows:
            parts.append((bias, {0: ((rows, wide_rows),)}))
        if not is_wide and wide_columns != columns:
            parts.append((input, {input.dim() - 1: ((columns, wide_columns),)}))
        wide = widen(parts, dtype, watched=input.requires_grad)
        if len(wide) > 1 and parts[1][0] is bias:
            bias = wide[1]
        y = F.linear(wide[-1] if parts[-1][0] is input else input, wide[0], bias)
        return y if keeps or wide_rows == rows else crop(y, y.dim() - 1, ((rows, wide_rows),))

    def _pays(self, x: torch.Tensor, taken: dict[Any, Any] | None, space: dict[Any, Any] | None) -> bool:
        """Whether to pad what is not padded yet."""
        is_enough = x.numel() >= self.least_rows * self.sizes[1]
        if space is not None:
            return bool(space.setdefault(_WIDE, is_enough))
        # Where features were to be handed on and are not, nobody knows what padding is worth.
        is_alone = taken is None and (self.takes is not None or self.gives is not None)
        return is_enough and (not is_alone or torch.compiler.is_compiling())


@dataclass(frozen=True, slots=True)
class PaddedLayer:
    """One layer of a :class:`Padding`; sizes are (out_features, in_features).

    Attributes:
        takes, gives: The path of the module within which it is given padded features, and hands them on.
    """

    path: str
    old: tuple[int, int]
    new: tuple[int, int]
    least_rows: int
    takes: str | None = None
    gives: str | None = None


@dataclass(frozen=True)
class Padding(ChangeSet):
    """Linear layers whose products are padded.

    Attributes:
        layers: The layers, in the order of ``modules``.
    """

    layers: tuple[PaddedLayer, ...]

    @property
    def parents(self) -> tuple[str, ...]:
        """Paths of the modules within which outputs stay padded from layer to layer."""
        return tuple(dict.fromkeys(layer.gives for layer in self.layers if layer.gives is not None))

    @property
    def summary(self) -> str:
        sizes = {
            old: new
            for layer in self.layers
            for old, new in zip(layer.old, layer.new, strict=True)
            if old != new
        }
        changes = " and ".join(f"{old} to {new}" for old, new in sizes.items())
        between = ", and what passes between them" if self.parents else ""
        layers = listed(self.modules, "linear layers")
        return f"Pad the product of {layers}{between}, from {changes} features."

    def make(self, run: Run, edits: Edits) -> None:
        modules = [submodule(run.model, layer.path) for layer in self.layers]
        for layer, module in zip(self.layers, modules, strict=True):
            require_plain(module, layer.path, nn.Linear)
        regions = regions_of(run.model, self.parents, edits)
        for layer, module in zip(self.layers, modules, strict=True):
            takes, gives = (None if path is None else regions[path] for path in (layer.takes, layer.gives))
            edits.behave(module, PaddedProduct(layer.old, layer.new, layer.least_rows, takes, gives))


class PadLinear(Fix):
    """Pads the products of linear layers whose features are no multiple of 16 bytes.

    The layer copies its weight into a matrix of padded sizes (under autocast it is copied anyway, to be
    cast), pads its input where that is not padded already, and returns the real columns of the result. Added
    columns are zeros, so that outputs and gradients are those of the layer as it was. Parameters do not
    change. With too few rows for the copies to pay, the layer runs unpadded.

    Between two such layers the columns stay, where the ``forward`` of one module, traced symbolically, shows
    nothing but elementwise functions there: the gate of a SwiGLU layer, or Linear, GELU, Linear. Dropout is
    in the way, since the same seed would drop others.

    Refused: layers that are no plain ``nn.Linear``, or whose product another module computes from their
    weight. Hooks on a layer are served, and keep its outputs from staying padded.
    """

    name = "pad-linear"
    rules = ("ALN001",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        for group in groups(context.step):
            if not group.vocabularies and not group.recurrent:
                yield from paddings(context, group)
        yield from _computed_weights(context)


def paddings(context: Context, group: Group) -> Iterator[ChangeSet | Refusal]:
    """The candidates for the layers of a group: the chains among them, and the rest, each by shape."""
    sizes, _, _ = group.padded(context)
    plain: dict[str, PaddedLayer] = {}
    for layer in group.layers:
        try:
            _require_layer(context, layer)
        except RefusedError as refused:
            yield Refusal((layer.module,), refused.what)
            continue
        old = (layer.out_features, layer.in_features)
        new = (sizes.get(old[0], old[0]), sizes.get(old[1], old[1]))
        plain[layer.module] = PaddedLayer(layer.module, old, new, _least_rows(context, layer, new))
    chained: dict[str, None] = {}
    for size in group.sizes:
        for chain in chains(context.run.model, plain, size):
            chained |= dict.fromkeys((*chain.givers, *chain.takers))
            for path in chain.givers:
                plain[path] = replace(plain[path], gives=chain.parent)
            for path in chain.takers:
                plain[path] = replace(plain[path], takes=chain.parent)
    if chained:
        host_s = _host_s(context, group, chained) + REGION_S * len(chained)
        yield Padding(tuple(chained), tuple(plain.pop(path) for path in chained), host_s=host_s)
    shapes: dict[tuple[int, int], list[PaddedLayer]] = {}
    for padded in plain.values():
        shapes.setdefault(padded.old, []).append(padded)
    for layers in shapes.values():
        paths = tuple(layer.path for layer in layers)
        yield Padding(paths, tuple(layers), host_s=_host_s(context, group, paths))


def _host_s(context: Context, group: Group, paths: Iterable[str]) -> float:
    """Host time that the layers' Python adds to a step."""
    calls = {layer.module: len(layer.forward) for layer in group.layers}
    share = 1.0 if context.run.options.train else 0.6
    return share * LAYER_S * sum(calls[path] for path in paths)


def _computed_weights(context: Context) -> Iterator[Refusal]:
    """Misaligned layers whose weight is no parameter, which is why no finding names them."""
    modules = dict(context.run.model.named_modules())
    found = {
        entry.site.module
        for entry in context.step.ops
        if isinstance(entry.op, Gemm) and entry.phase == FORWARD and not weight(entry)
        if misaligned_operands(entry.op)
    }
    for path in sorted(found & modules.keys()):
        if isinstance(modules[path], nn.Linear):
            try:
                require_plain(modules[path], path, nn.Linear)
            except RefusedError as refused:
                yield Refusal((path,), refused.what)


def _require_layer(context: Context, layer: Linear) -> None:
    module = submodule(context.run.model, layer.module)
    require_plain(module, layer.module, nn.Linear)
    if not layer.forward:
        raise RefusedError(f"the product with {layer.parameter} is not one of {layer.module}")
    if any(each.is_innermost for each in behaviours(module)):
        raise RefusedError(f"{layer.module} is changed by another fix already")
    assert isinstance(module, nn.Linear)
    if (module.out_features, module.in_features) != (layer.out_features, layer.in_features):
        raise RefusedError(f"{layer.module} does not compute the product with {layer.parameter} itself")


def _least_rows(context: Context, layer: Linear, new: tuple[int, int]) -> int:
    """The fewest rows (a power of two, or those of the step) with which the padded forward product pays."""
    ops = [context.step.ops[index].op for index in layer.forward]
    step_rows = min(op.m for op in ops if isinstance(op, Gemm))
    return fewest_rows(step_rows, lambda rows: _pays(context, layer, new, rows))


def _pays(context: Context, layer: Linear, new: tuple[int, int], rows: int) -> bool:
    op = context.step.ops[layer.forward[0]].op
    assert isinstance(op, Gemm)
    before = replace(layer.resized(op, FORWARD, layer.in_features, layer.out_features), m=rows)
    after = replace(layer.resized(op, FORWARD, new[1], new[0]), m=rows)
    width = size_bytes(op.dtype)
    elements = new[0] * new[1] + (rows * new[1] if new[1] != layer.in_features else 0)
    copies = Streaming("copy", elements, elements * width, elements * width, op.dtype)
    after_s = sum(estimate(each, context.gpu).time_s for each in (after, copies))
    return after_s < (1 - _CLEAR) * estimate(before, context.gpu).time_s
