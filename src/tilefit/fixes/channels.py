"""Pad the channels of convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from tilefit.fixes.behaviour import behaviours
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.layers import CONVOLUTIONS, Fitted, Padded
from tilefit.fixes.modules import require_plain, submodule
from tilefit.fixes.padding import COMPARED_S, LAYER_S
from tilefit.fixes.paths import Trace, paddings, traces
from tilefit.ops import Conv
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.alignment import channels as channels_rule
from tilefit.rules.alignment import first_convolution as first_rule
from tilefit.rules.base import Replaced
from tilefit.rules.resize import pad

#: What the channels of a pixel are padded to: an access, a half and a whole cache line.
_MULTIPLES_BYTES = (16, 64, 128)
#: Numbers of channels that save less than this share of the step, as the rule prices them, are not tried.
_LEAST_GAIN = 0.002


class PadChannels(Fix):
    """Pads the channels of convolutions to a multiple of 16 bytes, and the images between them.

    A convolution copies its filters into a tensor with room for more channels (under autocast they are
    copied anyway, to be cast). The image it writes has the added channels, all zero, and keeps them through
    batch normalisation, pooling, resizing, elementwise functions, sums, concatenations and depthwise
    convolutions up to the next convolution, whose filters are zero there. Whatever else reads an image gets
    it cropped by the module that made it. Parameters, running statistics and the model's output do not
    change.

    Which images stay padded is read off the model's ``forward``, traced symbolically; where a module cannot
    be traced, each of its convolutions pads its own image and crops its own output. Parts that are called by
    themselves take and give the channels they always had, and so do all where somebody has replaced or
    watches a part of the traced module, or has changed an attribute that its ``forward`` may read.

    A first layer's few channels are padded to 4 or 8 where that is predicted to pay.

    Refused: convolutions that are no plain ``nn.Conv``. Grouped ones that are not depthwise are left alone.
    """

    name = "pad-channels"
    rules = ("ALN004", "ALN005")

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        step, model = context.step, context.run.model
        odd: dict[int, str] = {}
        for (channels, dtype), indices in channels_rule.misaligned(step).items():
            if _promises(context, channels_rule.padded(context, channels, dtype, indices)[1]):
                yield from _refusals(context, indices)
                odd.update(dict.fromkeys(channels, dtype))
        few: dict[int, list[int]] = {}
        for indices in first_rule.few_channels(step).values():
            op = step.ops[indices[0]].op
            assert isinstance(op, Conv)
            few[op.in_channels] = [
                new for new, ops in first_rule.padded(step, indices).items() if _promises(context, ops)
            ]
        if not odd and not any(few.values()):
            return
        found = traces(context.run)
        sizes, inputs = _present(model)
        for chosen in _alternatives(odd):
            # A first layer's few channels are another matter.
            read = {old: new for old, new in chosen.items() if old not in few}
            yield from _candidate(model, found, chosen, sizes | chosen, inputs | read)
        for old in few:
            for new in few[old]:
                yield from _candidate(model, found, {old: new}, sizes, inputs | {old: new})


def _alternatives(found: Mapping[int, str]) -> Iterator[dict[int, int]]:
    """What numbers of channels could be padded to: all to multiples of so many bytes; each by itself."""
    seen = []
    for multiple_bytes in _MULTIPLES_BYTES:
        chosen = {old: pad(old, multiple_bytes // size_bytes(dtype)) for old, dtype in found.items()}
        if chosen and chosen not in seen:
            seen.append(chosen)
            yield chosen
    if len(found) > 1:
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


def _candidate(
    model: nn.Module,
    found: list[Trace],
    chosen: Mapping[int, int],
    sizes: Mapping[int, int],
    inputs: Mapping[int, int],
) -> Iterator[Padded]:
    """The change that pads the chosen numbers beside those that are padded already, if there is one."""
    wanted = paddings(model, found, sizes, inputs)
    new = [padding for padding in wanted if not padding.is_made(model.get_submodule(padding.path))]
    # The parts of a module that is traced are padded together.
    roots = {root for padding in new for root in (padding.takes, padding.gives)} - {None}
    if new:
        together = tuple(p for p in wanted if p in new or roots & {p.takes, p.gives})
        host_s = LAYER_S * len(new) + COMPARED_S * sum(1 for _ in model.modules())
        paths = tuple(padding.path for padding in new)
        yield Padded(paths, tuple(chosen.items()), together, host_s=host_s)


def _present(model: nn.Module) -> tuple[dict[int, int], dict[int, int]]:
    """The numbers that are padded already, in images that are written and in images that are read."""
    sizes: dict[int, int] = {}
    inputs: dict[int, int] = {}
    for each in (behaviour for module in model.modules() for behaviour in behaviours(module)):
        if isinstance(each, Fitted):
            if each.wide_in is not None and len(each.wide_in) == 1:
                inputs |= dict(each.wide_in)
            if each.wide_out is not None and len(each.wide_out) == 1:
                sizes |= dict(each.wide_out)
    return sizes, inputs
