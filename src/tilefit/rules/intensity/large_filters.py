"""INT006: a large filter that no Tensor Core kernel takes."""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost.conv import falls
from tilefit.ops import BACKWARD_DATA, FORWARD, Conv, StepOp, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE


class LargeFilters(Rule):
    """A dense convolution's filter is larger than cuDNN's Tensor Core kernels take.

    What it sees: On Hopper, dense convolutions in 16 bits at stride 1 whose filter has more than 32 taps (7x7
    and larger) and more than 2^20 elements.

    Why it costs time: Forward pass and weight gradient fall to kernels that run at 20 to 35 TFLOP/s. Neither
    the layout nor the autotuner avoids them. The data gradient does not fall.

    Arithmetic: 32 images, 256 -> 256 channels at 14 x 14, 7x7, bf16, H100: 1.9 ms forward, 1.5 ms for the
    weight gradient, where 0.1 ms is usual. As a sum over the rows of the filter, seven convolutions of 1x7,
    all passes take 0.9 ms instead of 3.5. 8 images, 48 -> 512 channels at 112 x 112: 4.2 ms instead of 16.9.
    64 -> 64 channels at 56 x 56 do not fall, and the sum would take twice as long.

    Example::

        padded = F.pad(x, (0, 0, 3, 3))
        y = sum(
            F.conv2d(padded[:, :, row : row + x.shape[2]], weight[:, :, row : row + 1], padding=(0, 3))
            for row in range(7)
        )

    Each part is rounded to 16 bits before it is added.

    Source: measurements on an H100 (``benchmarks/large_filters.py``). Between 0.99 and 1.2 million elements
    nothing was measured.
    """

    code = "INT006"
    title = "filter too large for cuDNN's Tensor Core kernels"
    wrong = Case(
        "nn.Sequential(nn.Conv2d(256, 256, 7, padding=3), nn.Conv2d(256, 256, 7, padding=3))",
        "torch.empty(32, 256, 14, 14)",
        "--amp bf16 --channels-last",
    )
    right = wrong.but("7, padding=3", "5, padding=2")

    def check(self, context: Context) -> Proposals:
        convolutions = [
            (index, entry, op, replace(op, direction=FORWARD, bias=False))
            for index, entry, op in context.step.each(Conv)
        ]
        fallen = {layer for _, _, op, layer in convolutions if falls(op, context.gpu)}
        rows = {index: _rows(entry, op) for index, entry, op, layer in convolutions if layer in fallen}
        if not rows:
            return
        place = context.place(rows)
        many = f"{place.sites} convolutions have filters" if place.sites > 1 else "1 convolution has a filter"
        yield Proposal(
            place=place,
            message=f"{many} that cuDNN's Tensor Core kernels do not take: CUDA cores",
            fix="Sum one convolution for each row of the filter, or use smaller filters and train anew.",
            safety=ADVICE,
            change=Change(rows),
            arithmetic=(
                f"all passes: {context.saving(rows)}",
                f"shapes: {', '.join(sorted(op.shape for op in fallen))}",
            ),
        )


def _rows(entry: StepOp, op: Conv) -> tuple[StepOp, ...]:
    """A pass as a sum over the rows of the filter: each copies its rows of the image and adds its result; a
    data gradient is added to that of the padded image, which is cleared and cut."""
    part = replace(op, kernel_size=(1, op.kernel_size[1]), padding=(0, op.padding[1]), bias=False)
    part = replace(part, input_size=(op.output_size[0], op.input_size[1]))
    size = size_bytes(op.dtype)
    image = op.input_elements * size
    copied = Streaming("copy", op.input_elements, image, image, op.dtype, function="clone")
    written = op.output_elements if op.direction == FORWARD else op.input_elements
    added = Streaming("pointwise", written, 2 * written * size, written * size, op.dtype, function="add")
    adds = 3 if op.direction == BACKWARD_DATA else 1
    each = (part, copied, *[added] * adds)
    return tuple(replace(entry, op=one) for one in each) * op.kernel_size[0]
