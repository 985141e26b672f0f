"""Pad the products of linear layers, among them the heads of language models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from tilefit.cost import estimate
from tilefit.fixes.behaviour import behaviours
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.layers import Padded, Padding, channels_of
from tilefit.fixes.modules import fewest_rows, require_plain, submodule
from tilefit.fixes.padding import LAYER_S, REGION_S, wide_size
from tilefit.fixes.paths import by_itself, chains
from tilefit.ops import FORWARD, Gemm, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.alignment.features import Group, groups
from tilefit.rules.alignment.padding import misaligned_operands
from tilefit.rules.layers import Linear, weight

#: With few rows a layer is padded only where it clearly pays: the times of small products are the least sure.
_CLEAR = 0.2


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
                yield from _paddings(context, group)
        yield from _computed_weights(context)


class PadVocabulary(Fix):
    """Pads the product that scores every token of a vocabulary of 50257, 30522 or 32001.

    As ``pad-linear`` does for other layers. Only the head's product is padded, since looking up rows of the
    embedding does not mind their number: the table keeps its rows, tied weights stay one parameter, and the
    logits have as many columns as before, so that losses, sampling and ``generate`` notice nothing. They
    are copied out of the product, which is part of the price.
    """

    name = "pad-vocabulary"
    rules = ("ALN002",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        for group in groups(context.step):
            if group.vocabularies:
                yield from _paddings(context, group)


def _paddings(context: Context, group: Group) -> Iterator[ChangeSet | Refusal]:
    """The candidates for the layers of a group: the chains among them, and the rest, each by shape."""
    sizes, _, _ = group.padded(context)
    plain: dict[str, Padding] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for layer in group.layers:
        try:
            module = _required(context, layer)
        except RefusedError as refused:
            yield Refusal((layer.module,), refused.what)
        else:
            padding = by_itself(layer.module, module, sizes, sizes)
            assert padding is not None  # the group has its sizes
            plain[layer.module] = replace(padding, least_rows=_least_rows(context, layer, padding))
            shapes[layer.module] = channels_of(module)
    chained: dict[str, None] = {}
    for size in group.sizes:
        for each in chains(context.run.model, plain, size):
            chained[each.path] = None
            own = plain[each.path]
            takes = own.takes if each.takes is None else each.takes
            gives = own.gives if each.gives is None else each.gives
            plain[each.path] = replace(own, takes=takes, gives=gives)
    if chained:
        region_s = REGION_S * len(chained)
        yield _together(context, group, [plain.pop(path) for path in chained], region_s)
    alike: dict[tuple[int, int], list[Padding]] = defaultdict(list)
    for padding in plain.values():
        alike[shapes[padding.path]].append(padding)
    for paddings in alike.values():
        yield _together(context, group, paddings)


def _together(context: Context, group: Group, paddings: list[Padding], more_s: float = 0.0) -> Padded:
    """The change that pads some layers; ``more_s``: host time beside that of each."""
    calls = {layer.module: len(layer.forward) for layer in group.layers}
    sizes = {
        real: wide
        for padding in paddings
        for channels in (padding.wide_out, padding.wide_in)
        for real, wide in channels or ()
    }
    share = 1.0 if context.run.options.train else 0.6
    host_s = share * LAYER_S * sum(calls[padding.path] for padding in paddings) + more_s
    paths = tuple(padding.path for padding in paddings)
    return Padded(paths, tuple(sizes.items()), tuple(paddings), host_s=host_s)


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


def _required(context: Context, layer: Linear) -> nn.Linear:
    """The module of a layer.

    Raises:
        RefusedError: it cannot be padded.
    """
    module = submodule(context.run.model, layer.module)
    require_plain(module, layer.module, nn.Linear)
    assert isinstance(module, nn.Linear)
    if not layer.forward:
        raise RefusedError(f"the product with {layer.parameter} is not one of {layer.module}")
    if any(each.is_innermost for each in behaviours(module)):
        raise RefusedError(f"{layer.module} is changed by another fix already")
    if (module.out_features, module.in_features) != (layer.out_features, layer.in_features):
        raise RefusedError(f"{layer.module} does not compute the product with {layer.parameter} itself")
    return module


def _least_rows(context: Context, layer: Linear, padding: Padding) -> int:
    """The fewest rows (a power of two, or those of the step) with which the padded forward product pays."""
    op = context.step.ops[layer.forward[0]].op
    assert isinstance(op, Gemm)
    old_in, old_out = layer.in_features, layer.out_features
    new_in, new_out = (
        old if wide is None else wide_size(wide)
        for old, wide in ((old_in, padding.wide_in), (old_out, padding.wide_out))
    )
    before, after = (layer.resized(op, FORWARD, *sizes) for sizes in ((old_in, old_out), (new_in, new_out)))
    width = size_bytes(op.dtype)

    def pays(rows: int) -> bool:
        elements = new_in * new_out + (rows * new_in if new_in != old_in else 0)
        copies = Streaming("copy", elements, elements * width, elements * width, op.dtype)
        after_s = sum(estimate(each, context.gpu).time_s for each in (replace(after, m=rows), copies))
        return after_s < (1 - _CLEAR) * estimate(replace(before, m=rows), context.gpu).time_s

    step_ops = (context.step.ops[index].op for index in layer.forward)
    return fewest_rows(min(each.m for each in step_ops if isinstance(each, Gemm)), pays)
