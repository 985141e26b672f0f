"""INT005: products per time step that could be one."""

from __future__ import annotations

from collections import defaultdict

from tilefit.ops import Gemm
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.flow import Flow, bias_gradient, is_add
from tilefit.rules.layers import gemm
from tilefit.rules.merging import one_product, one_stream
from tilefit.rules.recurrent.loops import Repeated, cell_loops, repeated_weights


class TimeSteps(Rule):
    """The same weight is multiplied once per time step although all inputs are known beforehand.

    What it sees: At least eight forward products of one shape with the same weight, none of whose
    inputs depends on an earlier one's output: the input projection inside a loop over time steps, a
    classifier applied to one position after another. The loop of a plain LSTM, GRU or RNN cell is left to
    RNN002, which replaces all of it.

    Why it costs time: Each product has only a mini-batch of rows, reads the whole weight, and pays a
    kernel's fixed cost. One product over all steps reads the weight once and is limited by arithmetic.

    Arithmetic: T products `m x n x k` become one `(T m) x n x k`. In the backward pass the T weight
    gradients become one with a contraction of `T m`, and the T - 1 additions that sum them up disappear.

    Example: Before the loop, `gates = self.ih(x)` for `x` of shape `[T, B, inputs]`; in the loop,
    `gates[t] + self.hh(h)`.

    Source: Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on
    GPUs" (2016), batching of the input products.
    """

    code = "INT005"
    title = "products per time step that could be one"
    wrong = Case(
        "PerPosition()",
        "torch.empty(64, 16, 1024)",
        "--amp bf16 --fused-optimizer",
        """
        class PerPosition(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(1024, 2048)

            def forward(self, x):
                return torch.stack([self.layer(row) for row in x])
        """,
    )
    right = wrong.but("torch.stack([self.layer(row) for row in x])", "self.layer(x)")

    def check(self, context: Context) -> Proposals:
        flow = Flow(context.step)
        repeated = [group for group in repeated_weights(flow) if not group.sequential]
        if not repeated:
            return
        in_cells = {loop.inputs.calls[0].forward for loop in cell_loops(flow)}
        by_product: dict[tuple[int, Gemm], list[Repeated]] = defaultdict(list)
        for group in repeated:
            if group.calls[0].forward not in in_cells:
                by_product[len(group.calls), gemm(flow.step, group.calls[0].forward)].append(group)
        for (count, op), groups in by_product.items():
            replaced: Edits = {}
            for group in groups:
                replaced.update(_at_once(flow, group))
            layers = [group.calls[0].layer for group in groups]
            yield Proposal(
                place=Place.of(layers, sites=len(layers)),
                message=f"{layers[0].parameter} is multiplied {count} times, {op.m} rows at a time, "
                "although no input waits for an earlier result",
                fix=f"Apply the layer once to all {count} inputs stacked, outside the loop.",
                safety=SAFE,
                change=Change(replaced),
                arithmetic=(f"{count} products {op.shape} -> one {count * op.m}x{op.n}x{op.k}",),
            )


def _at_once(flow: Flow, group: Repeated) -> Edits:
    step = flow.step
    forward = [call.forward for call in group.calls]
    replaced = one_product(step, forward, "m", forward[0])
    data = [call.backward_data for call in group.calls if call.backward_data is not None]
    if data:
        replaced |= one_product(step, data, "m", max(data))
    weight = [call.backward_weight for call in group.calls if call.backward_weight is not None]
    if weight:
        replaced |= one_product(step, weight, "k", max(weight))
        biases = [index for call in group.calls if (index := bias_gradient(flow, call)) is not None]
        replaced |= one_stream(step, biases)
        sums = flow.reachable([*weight, *biases], lambda index: is_add(step.ops[index]))
        replaced |= dict.fromkeys(sums, ())
    return replaced
