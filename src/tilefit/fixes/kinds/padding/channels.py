"""Pad the channels of convolutions, and the products of linear layers and heads of language models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from tilefit.cost import estimate
from tilefit.fixes.changes.behaviour import behaviours, is_replaced
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, Refusal, RefusedError, fix, refuse
from tilefit.fixes.changes.modules import fewest_rows, require_plain, submodule
from tilefit.fixes.kinds.padding.layers import CONVOLUTIONS, Fitted, Layer, padded, refitted
from tilefit.fixes.kinds.padding.tensors import LAYER_S
from tilefit.ops import FORWARD, Conv, Gemm, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.alignment import channels as channels_rule
from tilefit.rules.alignment import first_convolution as first_rule
from tilefit.rules.alignment.features import Group, groups
from tilefit.rules.alignment.padding import misaligned_operands
from tilefit.rules.base import Replaced
from tilefit.rules.layers import Linear, weight
from tilefit.rules.resize import pad
from tilefit.rules.sites import listed

#: What the channels of a pixel are padded to: an access, a half and a whole cache line.
_MULTIPLES_BYTES = (16, 64, 128)
#: Numbers of channels that save less than this share of the step, as the rule prices them, are not tried.
_LEAST_GAIN = 0.002


@fix("pad-channels", "ALN004", "ALN005")
def pad_channels(context: Context) -> Found:
    """Pads the channels of convolutions to a multiple of 16 bytes.

    A convolution copies its filters into a tensor with room for more channels (under autocast they are
    copied anyway, to be cast), pads the image it reads, and returns the real channels of the result. The
    compiler makes one kernel of that and what lies between two convolutions. Parameters and whatever a
    module returns do not change.

    A first layer's few channels are padded to 4 or 8 where that is predicted to pay.

    Refused: convolutions that are no plain ``nn.Conv``; those of a compiled model with depthwise ones: with
    both padded, inverted residuals took 35.3 ms a step where 33.2 were, 16 copies of images more (an H100,
    ``benchmarks/rare_fixes.py``). Grouped ones are left alone.
    """
    step, model = context.step, context.run.model
    misaligned = channels_rule.misaligned(step)
    if context.run.options.compile and (apart := _depthwise(model)):
        indices = [index for found in misaligned.values() for index in found]
        if paths := tuple(dict.fromkeys(step.ops[index].site.module for index in indices)):
            yield Refusal(
                paths, f"compiled, beside depthwise convolutions ({apart}) it was measured to lose time"
            )
        return
    odd: dict[int, str] = {}
    for (channels, dtype), indices in misaligned.items():
        if _promises(context, channels_rule.padded(context, channels, dtype, indices)[1]):
            yield from _refusals(context, indices)
            odd.update(dict.fromkeys(channels, dtype))
    few = set()
    for indices in first_rule.few_channels(step).values():
        op = step.ops[indices[0]].op
        assert isinstance(op, Conv)
        few.add(op.in_channels)
        for new, ops in first_rule.padded(step, indices).items():
            if _promises(context, ops):
                yield from _candidate(model, {}, {op.in_channels: new})
    for chosen in _alternatives(odd):
        # A first layer's few channels are another matter.
        yield from _candidate(model, chosen, {old: new for old, new in chosen.items() if old not in few})


def _depthwise(model: nn.Module) -> str:
    """The first depthwise convolution of a model; empty where it has none."""
    convolutions = ((path, each) for path, each in model.named_modules() if isinstance(each, nn.Conv2d))
    return next((path for path, each in convolutions if each.groups == each.in_channels > 1), "")


def _alternatives(found: Mapping[int, str]) -> Iterator[dict[int, int]]:
    """What numbers of channels could be padded to: all to multiples of so many bytes; each by itself."""
    for multiple_bytes in _MULTIPLES_BYTES:
        yield {old: pad(old, multiple_bytes // size_bytes(dtype)) for old, dtype in found.items()}
    for old, dtype in found.items():
        yield {old: pad(old, _MULTIPLES_BYTES[1] // size_bytes(dtype))}


def _promises(context: Context, resized: Replaced) -> bool:
    """Whether the convolutions alone would save something worth a closer look."""
    before_s = context.time_s(resized)
    return before_s - context.replaced_s(resized) > _LEAST_GAIN * context.estimate.time_s


def _refusals(context: Context, indices: Iterable[int]) -> Iterator[Refusal]:
    for path in dict.fromkeys(context.step.ops[index].site.module for index in indices):
        try:
            module = submodule(context.run.model, path)
            if type(module) not in CONVOLUTIONS:
                require_plain(module, path, nn.Conv2d)
        except RefusedError as refused:
            yield Refusal((path,), refused.what)


def _candidate(model: nn.Module, sizes: Mapping[int, int], inputs: Mapping[int, int]) -> Iterator[ChangeSet]:
    """The change that pads these numbers in what is written and read, beside others, if there is one."""
    new: dict[str, Fitted] = {}
    for path, module in model.named_modules():
        if type(module) in CONVOLUTIONS and module.groups == 1 and not is_replaced(module):
            assert isinstance(module, Layer)
            if wide := refitted(module, sizes, inputs):
                new[path] = wide
    if new:
        where = next(iter(new)) if len(new) == 1 else f"{len(new)} modules"
        yield padded(new, f"Pad {_in_words({**sizes, **inputs})} channels in {where}.", LAYER_S * len(new))


def _in_words(sizes: Mapping[int, int]) -> str:
    """Sizes, each with what it is padded to."""
    *many, last = [f"{old} to {new}" for old, new in sizes.items()]
    return f"{', '.join(many)} and {last}" if many else last


# ---- linear layers -------------------------------------------------------------------------------

#: With few rows a layer is padded only where it clearly pays: the times of small products are the least sure.
_CLEAR = 0.2


@fix("pad-linear", "ALN001")
def pad_linear(context: Context) -> Found:
    """Pads the products of linear layers whose features are no multiple of 16 bytes.

    The layer copies its weight into a matrix of padded sizes (under autocast it is copied anyway, to be
    cast), pads its input where that is not padded already, and returns the real columns of the result. Added
    columns are zeros, so that outputs and gradients are those of the layer as it was. Parameters do not
    change. With too few rows for the copies to pay, the layer runs unpadded.

    Refused: layers that are no plain ``nn.Linear``, or whose product another module computes from their
    weight.
    """
    for group in groups(context.step):
        if not group.vocabularies and not group.recurrent:
            yield from _paddings(context, group)
    yield from _computed_weights(context)


@fix("pad-vocabulary", "ALN002")
def pad_vocabulary(context: Context) -> Found:
    """Pads the product that scores every token of a vocabulary of 50257, 30522 or 32001.

    As ``pad-linear`` does for other layers. Only the head's product is padded, since looking up rows of the
    embedding does not mind their number: the table keeps its rows, tied weights stay one parameter, and the
    logits have as many columns as before, so that losses, sampling and ``generate`` notice nothing. They
    are copied out of the product, which is part of the price.
    """
    for group in groups(context.step):
        if group.vocabularies:
            yield from _paddings(context, group)


def _paddings(context: Context, group: Group) -> Iterator[ChangeSet | Refusal]:
    """The candidates for the layers of a group, those of each shape by themselves."""
    sizes, _, _ = group.padded(context)
    alike: dict[tuple[int, int], dict[str, Fitted]] = defaultdict(dict)
    calls = {layer.module: len(layer.forward) for layer in group.layers}
    share = 1.0 if context.run.options.train else 0.6
    for layer in group.layers:
        try:
            module = submodule(context.run.model, layer.module)
            if isinstance(module, nn.MultiheadAttention):  # another fix's
                continue
            _require(module, layer)
        except RefusedError as refused:
            yield Refusal((layer.module,), refused.what)
        else:
            into, out = real = layer.in_features, layer.out_features
            wide = Fitted(sizes.get(into, into), sizes.get(out, out))
            least_rows = _least_rows(context, layer, wide)
            alike[real][layer.module] = replace(wide, least_rows=least_rows)
    for (into, out), wides in alike.items():
        pairs = {size: sizes[size] for size in (out, into) if size in sizes}
        words = f"Pad the product of {listed(wides, 'linear layers')}, from {_in_words(pairs)} features."
        yield padded(wides, words, share * LAYER_S * sum(calls[path] for path in wides))


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


def _require(module: nn.Module, layer: Linear) -> None:
    """Check that the module of a layer can be padded.

    Raises:
        RefusedError: it cannot.
    """
    require_plain(module, layer.module, nn.Linear)
    assert isinstance(module, nn.Linear)
    refuse(not layer.forward, f"the product with {layer.parameter} is not one of {layer.module}")
    if any(each.is_innermost for each in behaviours(module)):
        raise RefusedError(f"{layer.module} is changed by another fix already")
    if (module.out_features, module.in_features) != (layer.out_features, layer.in_features):
        raise RefusedError(f"{layer.module} does not compute the product with {layer.parameter} itself")


def _least_rows(context: Context, layer: Linear, wide: Fitted) -> int:
    """The fewest rows (a power of two, or those of the step) with which the padded forward product pays."""
    op = context.step.ops[layer.forward[0]].op
    assert isinstance(op, Gemm)
    now = layer.in_features, layer.out_features
    before, after = (layer.resized(op, FORWARD, *sizes) for sizes in (now, (wide.into, wide.out)))
    width = size_bytes(op.dtype)

    def pays(rows: int) -> bool:
        elements = wide.into * (wide.out + (rows if wide.into > layer.in_features else 0))
        copies = Streaming("copy", elements, elements * width, elements * width, op.dtype)
        after_s = sum(estimate(each, context.gpu).time_s for each in (replace(after, m=rows), copies))
        return after_s < (1 - _CLEAR) * estimate(replace(before, m=rows), context.gpu).time_s

    step_ops = (context.step.ops[index].op for index in layer.forward)
    return fewest_rows(min(each.m for each in step_ops if isinstance(each, Gemm)), pays)
