"""ALN005: the first convolution's channels."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilefit.ops import FORWARD, Conv, Step, StepOp, Streaming
from tilefit.ops.dtypes import TENSOR_CORE_DTYPES, elements_per_access, size_bytes
from tilefit.rules.base import Case, Change, Context, Edits, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.units import counted

#: The least share of the layer's time that is worth a word: the model errs by several per cent on what
#: distinguishes 3, 4 and 8 channels.
_CLEAR_GAIN = 0.1


class FirstConvolution(Rule):
    """A first convolution on three channels would be faster on four or eight.

    What it sees: a convolution of an image with fewer channels than 16 bytes hold (3 of a colour image, 1
    of a spectrogram), and what it would take on 4 or 8 channels, the added ones zero, in the passes the
    step really runs (a first layer has no data gradient).

    Why it can cost time: with three channels in fp16 a pixel has 6 bytes, so that no two pixels begin at
    an aligned address. cuDNN has kernels for 4 channels with stride 2, and uses its general ones at 8.

    Arithmetic: it depends on the GPU and the layer, so the rule speaks only where the model predicts a gain
    with the padding copy paid. On an H200, 256 images of 224 x 224, 7 x 7 filters, stride 2, on 3, 4 and 8
    channels: forward 1773, 1758, 1719 µs, weight gradient 1122, 1113, 908 µs, the copy to 8 channels
    207 µs: 2 % of the layer, nothing to speak of. In a data loader, where the copy is free, 9 %.

    Example: ``nn.Conv2d(3, 64, 7, stride=2)`` -> ``nn.Conv2d(4, 64, 7, stride=2)`` with ``x = F.pad(x, (0,
    0, 0, 0, 0, 1))``, better in the data loader, where it is free.

    Sources: NVIDIA, "Convolutional Layers User's Guide", on padding the first layer to four channels; the
    times are measurements on an H200, ``benchmarks/first_convolution.py``.
    """

    code = "ALN005"
    title = "first convolution with too few channels"
    wrong = Case(
        "nn.Conv2d(3, 64, 3, stride=2, padding=1)",
        "torch.empty(256, 3, 224, 224)",
        "--amp bf16 --channels-last --infer",
    )
    right = wrong.but("Conv2d(3, ", "Conv2d(8, ").but("256, 3,", "256, 8,")

    def check(self, context: Context) -> Proposals:
        for indices in few_channels(context.step).values():
            yield from self._proposals(context, indices)

    def _proposals(self, context: Context, indices: list[int]) -> Proposals:
        step = context.step
        first = step.ops[indices[0]].op
        assert isinstance(first, Conv)
        options = padded(step, indices)
        if not options:
            return
        new = min(options, key=lambda c: context.replaced_s(options[c]))
        added = new - first.in_channels
        change = options[new]
        if context.replaced_s(change) > (1 - _CLEAR_GAIN) * context.time_s(indices):
            return
        yield Proposal(
            place=context.place(indices),
            message=f"the first convolution reads {first.in_channels} channels; {new} would be faster",
            fix=f"Give it {new} input channels and pad the images with {counted(added, 'zero channel')}, in "
            f"the data loader or by F.pad(x, ({'0, 0, ' * len(first.input_size)}0, {added})).",
            safety=SAFE,
            change=Change(change),
            arithmetic=tuple(
                f"{step.ops[index].phase} {step.ops[index].op.shape}: "
                f"{context.faster(index, change[index][-1].op)} on {new} channels"
                for index in indices
            ),
        )


def few_channels(step: Step) -> dict[str, list[int]]:
    """Convolutions of images whose pixels have fewer channels than 16 bytes hold, by module."""
    layers: dict[str, list[int]] = {}
    transposed = set()
    for index, entry, op in step.each(Conv):
        if (
            op.groups == 1
            and op.dtype in TENSOR_CORE_DTYPES
            and op.in_channels < elements_per_access(op.dtype)
        ):
            layers.setdefault(entry.site.module, []).append(index)
            if entry.phase == FORWARD != op.direction:  # it writes the image, as a decoder's last one does
                transposed.add(entry.site.module)
    return {module: indices for module, indices in layers.items() if module not in transposed}


def padded(step: Step, indices: list[int]) -> dict[int, Edits]:
    """By the number of channels that a layer's images can be padded to: its operations then."""
    first = step.ops[indices[0]].op
    assert isinstance(first, Conv)
    sizes = [c for c in (4, elements_per_access(first.dtype)) if c > first.in_channels]
    return {new: {index: _padded(step.ops[index], new) for index in indices} for new in sizes}


def _padded(entry: StepOp, channels: int) -> tuple[StepOp, ...]:
    """The convolution on more channels; before the forward pass, the copy that pads the image."""
    op = entry.op
    assert isinstance(op, Conv)
    wider = replace(op, in_channels=channels)
    if entry.phase != FORWARD:
        return (replace(entry, op=wider),)
    size = size_bytes(op.dtype)
    pixels = op.batch * prod(op.input_size)
    copy = Streaming(
        "copy", pixels * channels, pixels * op.in_channels * size, pixels * channels * size, op.dtype
    )
    return replace(entry, op=copy, name="aten.constant_pad_nd"), replace(entry, op=wider)
