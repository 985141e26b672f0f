"""INT002: depthwise convolution after an expansion."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Conv, Streaming
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE
from tilefit.rules.flow import Flow
from tilefit.units import number

#: A place is proposed if it saves this share of its GPU time: the model is another one afterwards.
_LEAST_GAIN = 0.2


class Depthwise(Rule):
    """An expansion by 1x1 and a depthwise convolution could be one ordinary convolution.

    What it sees: A 1x1 convolution, perhaps normalisation and activation, then a depthwise convolution
    (one input channel per group): the inverted bottleneck of MobileNet and EfficientNet.

    Why it costs time: A depthwise convolution does 2 k^2 FLOP for each element it reads and writes, far
    below what a GPU needs to be busy, and does not run on Tensor Cores. The expanded activations between
    the two convolutions are the largest of the network and pass through memory several times.

    Arithmetic: 3x3 depthwise in 16 bits: 18 FLOP per 4 bytes, 4.5 FLOP per byte; a GPU needs 140 to 300.
    One 3x3 convolution from C to e C channels does 9 C / (C + 9) times the FLOPs of the pair, on Tensor
    Cores, and moves the expanded activations once. With few channels (early stages) it is faster, with many
    it is not; the gain is computed for each place, and only those that gain are proposed.

    Example: EfficientNetV2 replaces its first MBConv blocks by such Fused-MBConv blocks. It is another
    model with more weights: it must be trained anew.

    Source: Tan and Le, "EfficientNetV2: Smaller Models and Faster Training" (2021), section 3.2.
    """

    code = "INT002"
    title = "depthwise convolution after an expansion"
    wrong = Case(
        "Bottleneck()",
        "torch.empty(128, 16, 112, 112)",
        "--amp bf16 --channels-last",
        """
        class Bottleneck(nn.Sequential):
            def __init__(self, channels=16, wide=96):
                depthwise = nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=wide, bias=False)
                super().__init__(
                    nn.Conv2d(channels, channels, 1),
                    nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()),
                    nn.Sequential(depthwise, nn.BatchNorm2d(wide), nn.ReLU()),
                    nn.Conv2d(wide, channels, 1, bias=False),
                )
        """,
    )
    right = wrong.but(
        "depthwise = nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=wide",
        "depthwise = nn.Conv2d(channels, wide, 3, stride=2, padding=1",
    ).but(
        "nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU())",
        "nn.Identity()",
    )

    def check(self, context: Context) -> Proposals:
        step, flow = context.step, Flow(context.step)
        blocks = []
        for index, entry, op in step.each(Conv):
            if op.is_depthwise and op.direction == entry.phase == FORWARD:
                block = _block(flow, index)
                if block is not None and _gain(context, block) >= _LEAST_GAIN:
                    blocks.append(block)
        if not blocks:
            return
        best = max(blocks, key=lambda block: _gain(context, block))
        sites = [step.ops[block.index].site for block in blocks]
        merged = _merged(best.expand, best.depthwise)
        yield Proposal(
            place=Place.of(sites, step.ops[best.index].site.source, len(blocks)),
            message=f"{len(blocks)} depthwise convolutions after a 1x1 expansion do about "
            f"{number(best.depthwise.intensity)} FLOP per byte; this GPU needs "
            f"{number(context.gpu.ops_per_byte(best.depthwise.dtype))}",
            fix="Use one ordinary convolution in place of each pair (Fused-MBConv), and train anew.",
            safety=ADVICE,
            change=Change({i: ops for block in blocks for i, ops in block.replaced.items()}),
            arithmetic=(
                f"{step.ops[best.index].site.module}: {best.expand.shape}, then {best.depthwise.shape} "
                f"-> {merged.shape}",
                f"its FLOPs, forward: {number((best.expand.flop + best.depthwise.flop) / 1e9)} -> "
                f"{number(merged.flop / 1e9)} G",
                f"at: {', '.join(site.module for site in sites)}",
            ),
        )


def _gain(context: Context, block: _Block) -> float:
    """Share of a block's GPU time that the change saves."""
    return 1 - context.replaced_s(block.replaced) / context.time_s(block.replaced)


@dataclass(frozen=True, slots=True)
class _Block:
    index: int
    expand: Conv
    depthwise: Conv
    replaced: Edits


def _merged(expand: Conv, depthwise: Conv) -> Conv:
    """The ordinary convolution with the channels of the one and the window of the other."""
    return replace(
        expand,
        input_size=depthwise.input_size,
        kernel_size=depthwise.kernel_size,
        stride=depthwise.stride,
        padding=depthwise.padding,
        dilation=depthwise.dilation,
    )


def _block(flow: Flow, index: int) -> _Block | None:
    step = flow.step
    depthwise = step.ops[index].op
    assert isinstance(depthwise, Conv)
    between = _back(flow, index)
    if between is None:
        return None
    first = between.pop()
    expand = step.ops[first].op
    assert isinstance(expand, Conv)
    if expand.groups > 1 or set(expand.kernel_size) != {1} or set(expand.stride) != {1}:
        return None
    if expand.out_channels != depthwise.in_channels or depthwise.out_channels != depthwise.in_channels:
        return None
    merged = _merged(expand, depthwise)
    replaced: Edits = dict.fromkeys((index, *between), ())
    replaced[first] = (replace(step.ops[first], op=merged),)
    parts = depthwise, expand, merged
    module, outer = step.ops[index].site.module, step.ops[first].site.module
    for i, entry, op in step.each(Conv):
        if entry.phase not in (BACKWARD_DATA, BACKWARD_WEIGHT):
            continue
        own, before, after = (replace(part, direction=op.direction, bias=False) for part in parts)
        if entry.site.module == module and op == own:
            replaced[i] = ()
            if entry.phase == BACKWARD_DATA:
                replaced.update((j, ()) for j in _gradients_after(flow, i))
        elif entry.site.module == outer and op == before:
            replaced[i] = (replace(entry, op=after),)
    return _Block(index, expand, depthwise, replaced)


def _back(flow: Flow, index: int) -> list[int] | None:
    """The streaming operations before a convolution, and last the convolution before them."""
    ops, between = flow.step.ops, ("pointwise", "normalization", "copy")
    way = flow.way(
        index, flow.before, lambda entry: isinstance(entry.op, Conv), lambda e: e.op.category in between, 6
    )
    return way if way and all(ops[i].phase == FORWARD for i in way) else None


def _gradients_after(flow: Flow, index: int) -> list[int]:
    """The streaming operations from a convolution's data gradient to the next convolution's gradients."""
    step = flow.step
    return sorted(flow.reachable([index], lambda i: isinstance(step.ops[i].op, Streaming)))
