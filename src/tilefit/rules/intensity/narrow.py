"""INT003: narrow products that could be folded away."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from tilefit.ops import Gemm, StepOp, Streaming
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.flow import Flow, LinearCall, is_add, linear_calls
from tilefit.rules.layers import gemm

#: A product narrower than this does not fill the columns of one efficient tile.
_NARROW = 128


class NarrowPair(Rule):
    """In inference, two linear layers with a narrow waist between them could be one, or none.

    What it sees: In inference, a linear layer of fewer than 128 outputs whose result, but for a constant
    factor, goes only into another linear layer: an adapter (LoRA), a factorised layer. If the pair's
    result is added to that of a full layer on the same input, the pair can be merged into its weight.

    Why it costs time: A product with few columns, then one with few terms, both do little arithmetic for
    the rows they read and write, and each pays a kernel's fixed cost. Efficient tiles are 128 to 256 wide.

    Arithmetic: An adapter of rank 8 on a 4096x4096 layer adds 0.4 % to its FLOPs, but reads its input
    and writes its output again, and the addition reads and writes them once more.

    Example: PEFT's `model.merge_and_unload()`; by hand, `W + scale * B @ A` in place of the three.

    Source: Hu et al., "LoRA" (2021), section 4.1: no added latency once merged.
    """

    code = "INT003"
    title = "narrow products that could be folded away"
    wrong = Case(
        "Adapted().bfloat16()",
        "torch.empty(8192, 2048, dtype=torch.bfloat16)",
        "--infer",
        """
        class Adapted(nn.Module):
            def __init__(self, features=2048, rank=16):
                super().__init__()
                self.full = nn.Linear(features, features, bias=False)
                self.down = nn.Linear(features, rank, bias=False)
                self.up = nn.Linear(rank, features, bias=False)

            def forward(self, x):
                return self.full(x) + 2.0 * self.up(self.down(x))
        """,
    )
    right = wrong.but(" + 2.0 * self.up(self.down(x))", "")

    def check(self, context: Context) -> Proposals:
        step = context.step
        if step.settings.training:
            return
        flow = Flow(step)
        calls = {call.forward: call for call in linear_calls(step)}
        pairs: dict[tuple[Gemm, Gemm, bool], list[tuple[LinearCall, Edits]]]
        pairs = defaultdict(list)
        for index, call in calls.items():
            pair = _second(flow, calls, index)
            if pair is None:
                continue
            between, second = pair
            narrow, wide = gemm(step, index), gemm(step, second)
            replaced: Edits = dict.fromkeys((index, *between, second), ())
            after = _added_to_full(flow, calls, index, second)
            if after is None:
                folded = replace(narrow, n=wide.n, bias=wide.bias, ld_a=0, ld_b=0)
                replaced[second] = (replace(step.ops[second], op=folded),)
            else:
                replaced.update((i, ()) for i in after)
            pairs[narrow, wide, after is not None].append((call, replaced))
        for (narrow, wide, merges), places in pairs.items():
            yield Proposal(
                place=Place.of(call.layer for call, _ in places),
                message=f"linear layers {narrow.k} -> {narrow.n} -> {wide.n} run as two narrow products",
                fix=(
                    "Merge the pair into the weight of the layer it is added to (LoRA: merge_and_unload)."
                    if merges
                    else "Multiply the two weights once and use one linear layer."
                ),
                safety=SAFE,
                change=Change({i: ops for _, replaced in places for i, ops in replaced.items()}),
                arithmetic=(
                    f"{narrow.shape} and {wide.shape} -> "
                    + ("no product" if merges else f"{narrow.m}x{wide.n}x{narrow.k}"),
                ),
            )


def _second(flow: Flow, calls: dict[int, LinearCall], index: int) -> tuple[list[int], int] | None:
    """The scalings after a narrow product and the product they lead to, if that is all they lead to."""
    op = gemm(flow.step, index)
    if op.n >= _NARROW or op.bias:
        return None
    way = flow.way(index, flow.after, lambda entry: isinstance(entry.op, Gemm), _is_scaling)
    if not way or way[-1] not in calls:
        return None
    second = gemm(flow.step, way[-1])
    return (way[:-1], way[-1]) if (second.k, second.m) == (op.n, op.m) else None


def _is_scaling(entry: StepOp) -> bool:
    return (
        isinstance(entry.op, Streaming)
        and entry.name.rstrip("_") in ("aten.mul", "aten.div", "aten._to_copy")
        and len([ref for ref in entry.inputs if ref.shape]) == 1
    )


def _added_to_full(flow: Flow, calls: dict[int, LinearCall], index: int, second: int) -> list[int] | None:
    """The scaling and the addition after a pair, if the other term is a linear layer of the same input."""
    step = flow.step
    after = flow.way(second, flow.after, is_add, _is_scaling)
    own = flow.operand(index)
    if not after or own is None:
        return None
    others = {*flow.writers[after[-1]].values()} & {*calls} - {second, *after}
    full = (other for other in others if gemm(step, other).k == gemm(step, index).k)
    return after if any(flow.operand(other) == own for other in full) else None
