"""Misaligned feature sizes, and which of them change together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tilefit.ops import FORWARD, Attention, Recurrent, Step, Streaming
from tilefit.ops.dtypes import elements_per_access
from tilefit.rules.alignment.channels import behind_convolutions
from tilefit.rules.alignment.padding import best_padding, is_misaligned
from tilefit.rules.base import Context, Replaced
from tilefit.rules.flow import Flow
from tilefit.rules.layers import Linear, linears
from tilefit.rules.outside.attention_by_hand import attention_chains
from tilefit.rules.resize import ANY, LAST, resize_features, resize_streams, resized

#: Losses that take scores of classes.
_OF_CLASSES = ("aten.nll_loss", "aten.cross_entropy")
#: In how many pieces a layer's result is cut: a gate's halves, queries, keys and values, a modulation's six.
_CUTS = range(2, 7)


@dataclass(slots=True)
class Group:
    """Misaligned sizes that meet in one layer: only together do they free it.

    Attributes:
        dtype: Element type of the layers.
        sizes: The sizes.
        vocabularies: Those of them that count tokens or classes.
        layers: Linear layers with any of the sizes.
        recurrent: Indices of recurrent operations with any of them.
        parts: What sizes are multiples of, and stay so when they change: by default of themselves.
    """

    dtype: str
    sizes: list[int] = field(default_factory=list)
    vocabularies: list[int] = field(default_factory=list)
    layers: list[Linear] = field(default_factory=list)
    recurrent: list[int] = field(default_factory=list)
    parts: dict[int, int] = field(default_factory=dict)

    def products(self) -> list[int]:
        """Indices of the linear layers' products."""
        return sorted(index for layer in self.layers for index in layer.indices)

    def padded(self, context: Context) -> tuple[dict[int, int], Replaced, Replaced]:
        """New sizes by old ones; the layers with them; the streaming operations with them."""
        step = context.step
        parts = {size: self.parts.get(size, size) for size in self.sizes}

        def whole(to: Mapping[int, int]) -> dict[int, int]:
            return {size: size // part * to[part] for size, part in parts.items()}

        to, layers = best_padding(
            context,
            dict.fromkeys(parts.values()),
            self.dtype,
            lambda to: {
                **resize_features(step, self.layers, whole(to)),
                **{
                    index: (resized(step.ops[index], whole(to), "input_size", "hidden_size", "proj_size"),)
                    for index in self.recurrent
                },
                **{
                    index: (resized(entry, to, "head_dim", "value_dim"),)
                    for index, entry, op in step.each(Attention)
                    if op.head_dim in to
                },
            },
        )
        return whole(to), layers, resize_streams(step, to | whole(to), ANY if self.vocabularies else LAST)


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
        features = layer.in_features, layer.out_features
        if sizes := {size for size in features if is_misaligned(size, layer.dtype)}:
            join(sizes, layer.dtype).layers.append(layer)
    for index, _, rnn in step.each(Recurrent):
        widths = rnn.input_size, rnn.hidden_size, rnn.proj_size
        if sizes := {size for size in widths if is_misaligned(size, rnn.dtype)}:
            join(sizes, rnn.dtype).recurrent.append(index)
    for group in groups:
        scored = scores & {layer.out_features for layer in group.layers}
        group.vocabularies = [size for size in group.sizes if size in scored]
    return groups


def designed(step: Step) -> list[Group]:
    """The groups of :func:`groups` as a designer changes them, so that the layers still fit together.

    A size is the same for layers of every element type. What a layer's result is cut into (the halves of a
    gate, queries, keys and values, heads) stays a part of it: a multiple of another size, or of a head's, is
    that multiple of what the other becomes. What follows from a convolution's channels is left to these.
    """
    apart = groups(step)
    if not apart:
        return []
    layers = linears(step)
    made = {layer.out_features for layer in layers}
    heads = _heads(step)
    of_channels = {size for _, size, _ in behind_convolutions(step)}
    found: list[Group] = []
    for group in apart:
        own = {*group.sizes} - of_channels
        # What no layer makes is cut out of what one makes.
        sizes = own | {size * n for size in own - made for n in _CUTS if size * n in made}
        for head, widths in heads.items():
            if is_misaligned(head, group.dtype) and any(_is_cut(size, widths) for size in own):
                sizes |= widths & {size for each in layers for size in (each.in_features, each.out_features)}
        if not sizes:
            continue
        vocabularies, recurrent, dtypes = [*group.vocabularies], [*group.recurrent], {group.dtype}
        for other in [each for each in found if sizes & {*each.sizes}]:
            found.remove(other)
            sizes |= {*other.sizes}
            vocabularies += other.vocabularies
            recurrent += other.recurrent
            dtypes.add(other.dtype)
        dtype = max(sorted(dtypes), key=elements_per_access)
        whole = Group(dtype, sorted(sizes), vocabularies, recurrent=sorted(recurrent))
        whole.layers = [each for each in layers if sizes & {each.in_features, each.out_features}]
        found.append(whole)
    for group in found:
        read = {layer.in_features for layer in group.layers} & {*group.sizes} - {*group.vocabularies}
        for size in {*group.sizes} - {*group.vocabularies}:
            parts = [part for part in read if _is_cut(size, {part})]
            parts += [head for head, widths in heads.items() if _is_cut(size, widths)]
            odd = (part for part in parts if is_misaligned(part, group.dtype))
            group.parts[size] = min(odd, default=size)
    return found


def _is_cut(size: int, widths: Iterable[int]) -> bool:
    """Whether it is one of the widths, or is cut into some of that width."""
    return any(size % width == 0 and size // width <= _CUTS[-1] for width in widths)


def _heads(step: Step) -> dict[int, set[int]]:
    """Head sizes, fused or written out, and the widths of what layers make for all heads."""
    fused = [op for *_, op in step.each(Attention)]
    heads: dict[int, set[int]] = defaultdict(set)
    for op in (*fused, *(chain.fused for chain in attention_chains(Flow(step)))):
        packed = op.num_heads + 2 * op.num_kv_heads
        heads[op.head_dim] |= {op.head_dim * number for number in (op.num_heads, op.num_kv_heads, packed)}
    return heads


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
