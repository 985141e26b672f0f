"""Misaligned feature sizes, and which of them change together."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilefit.ops import FORWARD, Recurrent, Step, Streaming
from tilefit.rules.alignment.padding import best_padding, is_misaligned
from tilefit.rules.base import Context, Replaced
from tilefit.rules.layers import Linear, linears
from tilefit.rules.resize import ANY, LAST, resize_features, resize_streams, resized

#: Losses that take scores of classes.
_OF_CLASSES = ("aten.nll_loss", "aten.cross_entropy")


@dataclass(slots=True)
class Group:
    """Misaligned sizes that meet in one layer: only together do they free it.

    Attributes:
        dtype: Element type of the layers.
        sizes: The sizes.
        vocabularies: Those of them that count tokens or classes.
        layers: Linear layers with any of the sizes.
        recurrent: Indices of recurrent operations with any of them.
    """

    dtype: str
    sizes: list[int] = field(default_factory=list)
    vocabularies: list[int] = field(default_factory=list)
    layers: list[Linear] = field(default_factory=list)
    recurrent: list[int] = field(default_factory=list)

    def products(self) -> list[int]:
        """Indices of the linear layers' products."""
        return sorted(index for layer in self.layers for index in layer.indices)

    def padded(self, context: Context) -> tuple[dict[int, int], Replaced, Replaced]:
        """New sizes by old ones; the layers with them; the streaming operations with them."""
        step = context.step
        sizes, layers = best_padding(
            context,
            self.sizes,
            self.dtype,
            lambda to: {
                **resize_features(step, self.layers, to),
                **{
                    index: (resized(step.ops[index], to, "input_size", "hidden_size", "proj_size"),)
                    for index in self.recurrent
                },
            },
        )
        return sizes, layers, resize_streams(step, sizes, ANY if self.vocabularies else LAST)


def groups(step: Step) -> list[Group]:
    """All misaligned feature sizes of linear and recurrent layers, each in one group."""
    layers = linears(step)
    scores = _vocabularies(step, layers)
    groups: list[Group] = []

    def join(sizes: set[int], dtype: str) -> Group:
        """The group of these sizes, made of all groups that have one of them."""
        joined = Group(dtype)
        for group in [g for g in groups if g.dtype == dtype and sizes & set(g.sizes)]:
            groups.remove(group)
            joined.sizes += group.sizes
            joined.layers += group.layers
            joined.recurrent += group.recurrent
        joined.sizes += sorted(sizes - set(joined.sizes))
        groups.append(joined)
        return joined

    for layer in layers:
        sizes = {s for s in (layer.in_features, layer.out_features) if is_misaligned(s, layer.dtype)}
        if sizes:
            join(sizes, layer.dtype).layers.append(layer)
    for index, entry in enumerate(step.ops):
        op = entry.op
        if isinstance(op, Recurrent):
            sizes = {s for s in (op.input_size, op.hidden_size, op.proj_size) if is_misaligned(s, op.dtype)}
            if sizes:
                join(sizes, op.dtype).recurrent.append(index)
    for group in groups:
        scored = scores & {layer.out_features for layer in group.layers}
        group.vocabularies = [size for size in group.sizes if size in scored]
    return groups


def _vocabularies(step: Step, layers: list[Linear]) -> set[int]:
    """The sizes over which a layer gives scores.

    Such a layer shares its weight with an embedding table, or is wider than its input and either has as
    many outputs as a table has rows or ends in a loss over classes.
    """
    tables = {
        ref.parameter: ref.shape[0]
        for entry in step.ops
        if entry.op.category == "embedding"
        for ref in entry.inputs
        if ref.parameter and len(ref.shape) == 2
    }
    lost = _tensors_of_loss(step)
    return {
        layer.out_features
        for layer in layers
        if layer.parameter in tables
        or (
            layer.out_features > layer.in_features
            and (layer.out_features in tables.values() or bool(lost & layer.outputs))
        )
    }


def _tensors_of_loss(step: Step) -> set[int]:
    """Ids of the tensors a loss over classes is computed from, through casts and softmaxes."""
    tensors: set[int] = set()
    for entry in reversed(step.ops):
        op = entry.op
        if entry.phase != FORWARD or not isinstance(op, Streaming):
            continue
        passes_on = op.role in ("softmax", "copy") and any(ref.id in tensors for ref in entry.outputs)
        if entry.name.startswith(_OF_CLASSES) or passes_on:
            tensors.update(ref.id for ref in entry.inputs if not ref.parameter)
    return tensors
