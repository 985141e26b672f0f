"""Pad the products of linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.cost import estimate
from tilefit.fixes.chains import chains
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.padding import crop, pad, working_dtype
from tilefit.fixes.run import Run
from tilefit.fixes.swap import require_plain, submodule, swap
from tilefit.ops import FORWARD, Gemm, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules import resize
from tilefit.rules.alignment.features import Group, groups
from tilefit.rules.alignment.padding import misaligned_operands
from tilefit.rules.layers import Linear, weight
from tilefit.rules.sites import listed

#: With few rows a layer is padded only where it clearly pays: the times of small products are the least sure.
_CLEAR = 0.2


class PaddedLinear(nn.Linear):
    """A linear layer that multiplies matrices of padded sizes; its parameters keep theirs.

    Attributes:
        padded_sizes: (out_features, in_features) of the product.
        keeps_padding: The result is [..., padded out_features], for layers that take it so.
        least_rows: With fewer rows than this (the input's sizes but the last, multiplied) padding costs more
            than it saves, and the layer runs as it always did.
    """

    padded_sizes: tuple[int, int]
    keeps_padding: bool
    least_rows: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features], or padded already, to [..., out_features]."""
        wide_out, wide_in = self.padded_sizes
        is_narrow = input.shape[-1] == self.in_features
        if is_narrow and input.numel() < self.least_rows * self.in_features:
            return super().forward(input)
        dtype = working_dtype(input)
        x = pad(input, (*input.shape[:-1], wide_in), dtype)
        weight = pad(self.weight, self.padded_sizes, dtype)
        bias = None if self.bias is None else pad(self.bias, (wide_out,), dtype)
        y = F.linear(x, weight, bias)
        return y if self.keeps_padding else crop(y, (*y.shape[:-1], self.out_features))

    def extra_repr(self) -> str:
        wide_out, wide_in = self.padded_sizes
        return f"{super().extra_repr()}, multiplied as {wide_in} -> {wide_out}"


@dataclass(frozen=True, slots=True)
class PaddedLayer:
    """One layer of a :class:`Padding`; sizes are (out_features, in_features)."""

    path: str
    old: tuple[int, int]
    new: tuple[int, int]
    least_rows: int
    keeps_padding: bool = False


@dataclass(frozen=True)
class Padding(ChangeSet):
    """Linear layers whose products are padded.

    Attributes:
        layers: The layers, in the order of ``modules``.
        parents: Paths of the modules within which outputs stay padded from layer to layer.
    """

    layers: tuple[PaddedLayer, ...]
    parents: tuple[str, ...] = ()

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

    @property
    def scopes(self) -> tuple[str, ...]:
        inside = [f"{path}." if path else "" for path in self.parents]
        alone = [path for path in self.modules if not any(path.startswith(prefix) for prefix in inside)]
        return (*self.parents, *alone)

    def miniature(self, run: Run) -> tuple[ChangeSet, dict[int, int]] | None:
        old = dict.fromkeys(size for layer in self.layers for size in layer.old)
        # Different sizes stay different, and as far from a multiple of 8 as they were.
        sizes = {size: 16 * number + size % 8 for number, size in enumerate(old, start=1)}
        layers = []
        for layer in self.layers:
            small = (sizes[layer.old[0]], sizes[layer.old[1]])
            module = submodule(run.model, layer.path)
            assert isinstance(module, nn.Linear)
            module.out_features, module.in_features = small
            module.weight = nn.Parameter(module.weight.new_empty(small))
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.new_empty(small[:1]))
            new = tuple(
                resize.pad(after, 8) if before != wide else after
                for after, before, wide in zip(small, layer.old, layer.new, strict=True)
            )
            layers.append(replace(layer, old=small, new=(new[0], new[1])))
        return replace(self, layers=tuple(layers)), sizes

    def make(self, run: Run, edits: Edits) -> None:
        modules = [submodule(run.model, layer.path) for layer in self.layers]
        for layer, module in zip(self.layers, modules, strict=True):
            require_plain(module, layer.path, nn.Linear)
        for layer, module in zip(self.layers, modules, strict=True):
            swap(
                *(edits, module, PaddedLinear),
                padded_sizes=layer.new,
                keeps_padding=layer.keeps_padding,
                least_rows=layer.least_rows,
            )


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
    calls = {layer.module: len(layer.forward) for layer in group.layers}
    chained: dict[str, None] = {}
    parents: dict[str, None] = {}
    for size in group.sizes:
        for chain in chains(context.run.model, plain, size):
            members = (*chain.givers, *chain.takers)
            if len({calls[path] for path in members}) > 1:
                continue  # one of them is called from elsewhere too
            chained |= dict.fromkeys(members)
            parents[chain.parent] = None
            for path in chain.givers:
                plain[path] = replace(plain[path], keeps_padding=True)
    if chained:
        yield Padding(tuple(chained), tuple(plain.pop(path) for path in chained), tuple(parents))
    shapes: dict[tuple[int, int], list[PaddedLayer]] = {}
    for padded in plain.values():
        shapes.setdefault(padded.old, []).append(padded)
    for layers in shapes.values():
        yield Padding(tuple(layer.path for layer in layers), tuple(layers))


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
    assert isinstance(module, nn.Linear)
    if (module.out_features, module.in_features) != (layer.out_features, layer.in_features):
        raise RefusedError(f"{layer.module} does not compute the product with {layer.parameter} itself")


def _least_rows(context: Context, layer: Linear, new: tuple[int, int]) -> int:
    """The fewest rows (a power of two, or those of the step) with which the padded forward product pays."""
    ops = [context.step.ops[index].op for index in layer.forward]
    step_rows = min(op.m for op in ops if isinstance(op, Gemm))
    rows = 1
    while rows < step_rows and not _pays(context, layer, new, rows):
        rows *= 2
    return min(rows, step_rows)


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
