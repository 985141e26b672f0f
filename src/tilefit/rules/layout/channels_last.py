"""LAY001: NCHW convolutions under Tensor Cores."""

from __future__ import annotations

from dataclasses import replace

from tilefit.gpus import Gpu
from tilefit.ops import Conv, Step, StepOp, Streaming
from tilefit.ops.dtypes import TENSOR_CORE_DTYPES
from tilefit.ops.streaming import CONTIGUOUS
from tilefit.rules.base import Case, Change, Context, Edits, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.flow import activation, copy_op
from tilefit.units import seconds


class ChannelsLast(Rule):
    """Convolutions run in NCHW where Tensor Cores want NHWC.

    What it sees: convolutions in two or three dimensions on 16-bit or TF32 operands that lie in memory
    channel by channel.

    Why it costs time: Tensor Core convolutions contract over the channels and read them contiguously. An
    image in NCHW is transposed before and after, by a kernel of its own or inside the convolution.

    Arithmetic: 256 images, bf16, H200: 64 -> 64 channels at 56 x 56 take 308 µs in NCHW and 146 µs in NHWC
    (2.1 times), 256 -> 256 at 14 x 14 137 and 81 µs (1.7 times). With channels that are no multiple of 8
    it is the other way round (60 channels: 372 and 425 µs), so fix those first (ALN004).

    Example::

        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)

    Convolution, batch normalization and pooling keep the format; group normalization copies images back,
    which is part of the price; ``view`` and ``reshape`` that flatten an image may copy.

    Sources: NVIDIA, "Convolutional Layers User's Guide", tensor layouts; the times are measurements on an
    H200 with cuDNN 9.19.
    """

    code = "LAY001"
    title = "NCHW convolutions under Tensor Cores"
    wrong = Case(
        "nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)))",
        "torch.empty(256, 64, 56, 56)",
        "--amp bf16",
    )
    right = wrong.under("--amp bf16 --channels-last")

    def check(self, context: Context) -> Proposals:
        step = context.step
        turned = channels_last(step, context.gpu)
        if not turned:
            return
        place = context.place(turned)
        volume = any(len(op.input_size) == 3 for i, _, op in step.each(Conv) if i in turned)
        memory_format = "torch.channels_last_3d" if volume else "torch.channels_last"
        conversions = _conversions(step)
        followers = _followers(step)
        packed = _packed(step)
        copies_s = context.replaced_s(packed) - context.time_s(packed)
        many = f"{place.sites} convolutions run" if place.sites > 1 else "1 convolution runs"
        yield Proposal(
            place=place,
            message=f"{many} in NCHW; the Tensor Cores' kernels read NHWC",
            fix=f"Call .to(memory_format={memory_format}) on the model and on its images.",
            safety=SAFE,
            change=Change({**dict.fromkeys(conversions, ()), **followers, **packed, **turned}),
            arithmetic=(
                f"convolutions, all passes: {context.saving(turned)}"
                + (f"; batch normalization and pooling: {context.saving(followers)}" if followers else ""),
                *(
                    [f"group normalization copies its images back to NCHW: {seconds(copies_s)}"]
                    if packed
                    else []
                ),
                *([f"{len(conversions):,} copies between the two formats fall away"] if conversions else []),
            ),
        )


def channels_last(step: Step, gpu: Gpu) -> Edits:
    """The convolutions that Tensor Cores would rather have in NHWC, in NHWC; CUDA cores take NCHW as well."""
    return {
        index: (replace(entry, op=replace(op, channels_last=True)),)
        for index, entry, op in step.each(Conv)
        if not op.channels_last
        and op.dtype in TENSOR_CORE_DTYPES
        and gpu.supports(op.dtype)
        and len(op.input_size) > 1
    }


def _followers(step: Step) -> Edits:
    """Batch normalization and pooling of images take the format of what they read."""
    return {
        index: (replace(entry, op=replace(op, strided=True)),)
        for index, entry, op in step.each(Streaming)
        if not op.strided
        and (op.role == "pooling" or (op.role == "normalization" and "batch_norm" in entry.name))
        and any(len(ref.shape) >= 4 for ref in entry.inputs)
    }


def _packed(step: Step) -> Edits:
    """Group normalization, which has a kernel for NCHW alone: it copies an image in NHWC first."""
    found: Edits = {}
    for index, entry, op in step.each(Streaming):
        image = activation(entry)
        if op.function.startswith("native_group_norm") and image is not None and len(image.shape) >= 4:
            copy = replace(copy_op(image, image), strided=True, inner=1, function=CONTIGUOUS)
            found[index] = (StepOp(copy, entry.phase, entry.site, "aten.clone", (image,)), entry)
    return found


def _conversions(step: Step) -> list[int]:
    """Copies that only turn an image from one format to the other."""
    convolved = {ref.id for _, entry, _ in step.each(Conv) for ref in (*entry.inputs, *entry.outputs)}
    found = []
    for index, entry, op in step.each(Streaming):
        refs = (*entry.inputs, *entry.outputs)
        is_of_image = all(len(ref.shape) >= 4 for ref in refs) and any(ref.id in convolved for ref in refs)
        if op.role == "copy" and op.strided and is_of_image and len({ref.dtype for ref in refs}) == 1:
            found.append(index)
    return found
