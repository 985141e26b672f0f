"""ALN004: channels of convolutions."""

from __future__ import annotations

from collections.abc import Mapping

from tilefit.ops import Conv, Step, StepOp
from tilefit.ops.dtypes import elements_per_access
from tilefit.rules.alignment.padding import best_padding, counted_lines, is_misaligned, misfit, with_zeros
from tilefit.rules.base import Case, Change, Context, Edits, Proposal, Proposals, Replaced, Rule
from tilefit.rules.layers import Linear, linears
from tilefit.rules.resize import CHANNEL, resize_features, resize_streams, resized


class ConvChannels(Rule):
    """The channels of a convolution are not a multiple of 16 bytes.

    What it sees: ungrouped convolutions with input or output channels that are no multiple of 8 in fp16
    and bf16 or 4 in TF32, apart from a first layer's few input channels (ALN005). Convolutions that share
    such a number, and numbers that meet in one, change together and are one finding.

    Why it costs time: in NHWC memory the channels are the contiguous dimension of the image and of the
    weights, and the Tensor Core kernels load them in pieces of 16 bytes. Other numbers get slower kernels;
    cuDNN before 7.6.3 did not use Tensor Cores for them at all.

    Arithmetic: 256 images of 56 x 56, 3 x 3 filters, bf16, NHWC, H200: 60 -> 60 channels take 425 µs,
    64 -> 64 take 146 µs, 2.9 times faster with 14 % more arithmetic. 250 -> 256 at 14 x 14 is 2.0 times
    faster.

    Example: ``nn.Conv2d(60, 60, 3)`` -> ``nn.Conv2d(64, 64, 3)``.

    Fix: choose a multiple of 8 (better 64) when you design or train the model; in a trained one, pad
    weights, biases and normalisation with zeros (a group normalisation's groups would be others).

    Sources: NVIDIA, "Convolutional Layers User's Guide", channels in and out; the times are measurements
    on an H200 with cuDNN 9.19.
    """

    code = "ALN004"
    title = "convolution channels not a multiple of 16 bytes"
    wrong = Case(
        "nn.Sequential(nn.Conv2d(64, 60, 3, padding=1), nn.ReLU(), nn.Conv2d(60, 60, 3, padding=1))",
        "torch.empty(256, 64, 56, 56)",
        "--amp bf16 --channels-last",
    )
    right = wrong.but("60", "64")

    def check(self, context: Context) -> Proposals:
        for (sizes, dtype), indices in misaligned(context.step).items():
            yield from self._proposals(context, sizes, dtype, indices)

    def _proposals(
        self, context: Context, sizes: tuple[int, ...], dtype: str, indices: list[int]
    ) -> Proposals:
        step = context.step
        padding, convolutions = padded(context, sizes, dtype, indices)
        if context.replaced_s(convolutions) >= context.time_s(indices):
            return  # what else gains by other sizes is no matter of alignment
        how, safety = with_zeros(step, padding)
        place = context.place(indices)
        lines = []
        for index in indices:
            entry, (after,) = step.ops[index], convolutions[index]
            faster = context.faster(index, after.op, kernels=True)
            lines.append(f"{entry.phase} {entry.op.shape} {dtype}: {faster}")
        odd = " and ".join(map(str, sizes))
        changes = " and ".join(f"{new} channels instead of {old}" for old, new in padding.items())
        behind = [each for each in behind_convolutions(step) if each[2] in padding]
        features = {size: size // channels * padding[channels] for _, size, channels in behind}
        changes += "".join(f", in_features of {old} -> {new}" for old, new in features.items())
        yield Proposal(
            place=place,
            message=f"{odd} channels are {misfit(dtype)} in {place.sites} convolutions",
            fix=f"Use {changes} ({how}).",
            safety=safety,
            change=Change(
                {
                    **resize_streams(step, padding, CHANNEL),
                    **_depthwise(step, padding),
                    **resize_features(step, [layer for layer, *_ in behind], features),
                    **convolutions,
                }
            ),
            arithmetic=tuple(counted_lines(lines)),
        )


def misaligned(step: Step) -> dict[tuple[tuple[int, ...], str], list[int]]:
    """Numbers of channels that are no multiple of 16 bytes, with their element type: the convolutions.

    Numbers that meet in a convolution belong together: it is aligned when both are.
    """
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for index, _, op in step.each(Conv):
        if op.groups > 1:
            continue
        few = op.in_channels < elements_per_access(op.dtype)
        own = {op.out_channels} if few else {op.in_channels, op.out_channels}
        sizes = {channels for channels in own if is_misaligned(channels, op.dtype)}
        if not sizes:
            continue
        indices = [index]
        for known in [key for key in groups if key[1] == op.dtype and sizes & {*key[0]}]:
            sizes.update(known[0])
            indices += groups.pop(known)
        groups[tuple(sorted(sizes)), op.dtype] = sorted(indices)
    return groups


def behind_convolutions(step: Step) -> list[tuple[Linear, int, int]]:
    """Linear layers that read images of misaligned channels, flattened or pooled: their features, and the
    channels that these are a multiple of. A size that a linear layer makes is none of a convolution's."""
    layers = linears(step)
    made = {layer.out_features for layer in layers}
    channels = [size for sizes, _ in misaligned(step) for size in sizes]
    return [
        (layer, size, of)
        for layer in layers
        if (size := layer.in_features) not in made
        for of in [max((each for each in channels if not size % each), default=0)]
        if of
    ]


def padded(
    context: Context, sizes: tuple[int, ...], dtype: str, indices: list[int]
) -> tuple[dict[int, int], Replaced]:
    """The best numbers of channels by those they replace, and the convolutions with them."""
    ops = context.step.ops
    return best_padding(
        context, sizes, dtype, lambda to: {index: (_resized(ops[index], to),) for index in indices}
    )


def _resized(entry: StepOp, sizes: Mapping[int, int]) -> StepOp:
    op = entry.op
    assert isinstance(op, Conv)
    # A first layer's few channels are the image's, not the layer's choice.
    own = [] if op.in_channels < elements_per_access(op.dtype) else ["in_channels"]
    return resized(entry, sizes, "out_channels", *own)


def _depthwise(step: Step, sizes: Mapping[int, int]) -> Edits:
    """The depthwise convolutions between, which carry the same channels."""
    return {
        index: (resized(entry, sizes, "in_channels", "out_channels", "groups"),)
        for index, entry, op in step.each(Conv)
        if op.groups == op.in_channels == op.out_channels and op.groups in sizes
    }
