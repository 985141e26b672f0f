"""INT004: parallel projections of one input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tilefit.ops import BACKWARD_DATA, Gemm, StepOp, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.alignment.padding import is_misaligned
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.flow import Flow, LinearCall, bias_gradient, is_add, is_cast, linear_calls, parent
from tilefit.rules.layers import gemm
from tilefit.rules.merging import one_product, one_stream
from tilefit.rules.sites import pattern
from tilefit.units import counted


class ParallelProjections(Rule):
    """Several linear layers multiply the same input and could be one product.

    What it sees: Forward products in sibling modules that read the same tensor (or casts of the same
    tensor) with the same rows, contraction, element type and layout, each with its own weight: the query,
    key and value projections of attention, the gate and up projections of a gated MLP.

    Why it costs time: Each product reads the whole input again. Under autocast each one also casts it
    again, and in the backward pass each makes its own input gradient, which must be cast back and added
    up. Narrow products (the keys and values of grouped-query attention) do not fill the GPU.

    Arithmetic: With rows m, inputs k and outputs n1, n2, ...: the products read `m k` elements once
    instead of once each. The merged data gradient `m x k x (n1+n2+...)` adds the parts up in its
    accumulator, so that the separate additions of `m k` elements disappear. In training the gradients of
    the parts must first be concatenated: one copy of `m (n1+n2+...)` elements, which is part of the price.

    Example: `q, k, v = self.qkv(x).chunk(3, dim=-1)` with one `nn.Linear(d, 3 * d)` instead of three
    `nn.Linear(d, d)`. The rows of the old weights, stacked, are the new weight: the function is the same.

    Source: NVIDIA, "Linear/Fully-Connected Layers User's Guide": efficiency grows with the number of
    outputs of one product.
    """

    code = "INT004"
    title = "parallel projections of one input that could be one product"
    wrong = Case(
        "GatedMlp()",
        "torch.empty(4096, 1024)",
        "--amp bf16",
        """
        class GatedMlp(nn.Module):
            def __init__(self, features=1024, hidden=2816):
                super().__init__()
                self.gate = nn.Linear(features, hidden, bias=False)
                self.up = nn.Linear(features, hidden, bias=False)
                self.down = nn.Linear(hidden, features, bias=False)

            def forward(self, x):
                gate, up = self.gate(x), self.up(x)
                return self.down(F.silu(gate) * up)
        """,
    )
    right = wrong.but("self.gate(x), self.up(x)", "self.up(x).chunk(2, -1)").but(
        "self.up = nn.Linear(features, hidden", "self.up = nn.Linear(features, 2 * hidden"
    )

    def check(self, context: Context) -> Proposals:
        step = context.step
        flow = Flow(step)
        by_form: dict[tuple[object, ...], list[list[LinearCall]]] = defaultdict(list)
        for group in groups(flow):
            names = _names(group)
            sizes = tuple(gemm(step, call.forward) for call in group)
            by_form[(names, sizes)].append(group)
        for alike in by_form.values():
            yield self._proposal(context, flow, alike)

    def _proposal(self, context: Context, flow: Flow, groups: list[list[LinearCall]]) -> Proposal:
        step = flow.step
        replaced: Edits = {}
        for group in groups:
            replaced.update(_merged(flow, group))
        first = groups[0]
        products = [gemm(step, call.forward) for call in first]
        names = _names(first)
        outputs = [product.n for product in products]
        m, k = products[0].m, products[0].k
        parents = list(dict.fromkeys(parent(group[0].layer.path) for group in groups))
        lines = [
            f"forward {m} x n x {k} for n in {', '.join(map(str, outputs))} -> {m}x{sum(outputs)}x{k}: "
            f"the input is read once, not {len(outputs)} times"
        ]
        if any(call.backward_data is not None for call in first):
            gone = counted(len(outputs) - 1, "addition")
            lines.append(
                f"data gradients -> one {m}x{k}x{sum(outputs)}: {gone} of {m}x{k} less; "
                f"a concatenation of {m}x{sum(outputs)} is new and counted"
            )
        odd = any(is_misaligned(size, products[0].dtype) for size in outputs)
        first_that = "; these sizes are misaligned, which costs more: see ALN001" if odd else ""
        lines.append(
            f"all that is merged, {counted(len(groups), 'time')}: {context.saving(replaced)}{first_that}"
        )
        return Proposal(
            place=Place(pattern(parents), first[0].layer.source, len(parents)),
            message=f"{', '.join(names)} multiply the same input in {len(names)} separate products",
            fix=f"Merge them into one linear layer of {sum(outputs)} outputs (stack the weights) and split "
            "its result.",
            safety=SAFE,
            change=Change(replaced),
            arithmetic=tuple(lines),
        )


def groups(flow: Flow) -> Iterator[list[LinearCall]]:
    """Calls of sibling layers that multiply the same input, in products of one form, all of them trained or
    none."""
    step = flow.step
    groups: dict[tuple[object, ...], list[LinearCall]] = defaultdict(list)
    for call in linear_calls(step):
        entry = step.ops[call.forward]
        op = gemm(step, call.forward)
        operand = flow.operand(call.forward)
        # A cell of torch.nn multiplies by its own weights.
        if operand is None or op.batch != 1 or step.modules.get(entry.site.module, "").endswith("Cell"):
            continue
        parameter = step.parameters.get(call.layer.parameter)
        trained = parameter is None or parameter.trainable
        form = op.m, op.k, op.dtype, op.layout
        key = (*operand, *form, parent(entry.site.module), entry.recomputed, trained)
        groups[key].append(call)
    for group in groups.values():
        if len(group) > 1 and len({call.layer.parameter for call in group}) == len(group):
            yield group


def _names(group: list[LinearCall]) -> tuple[str, ...]:
    return tuple(call.layer.path.rpartition(".")[2] for call in group)


def _merged(flow: Flow, group: list[LinearCall]) -> Edits:
    """The operations of one group of parallel products, merged."""
    step = flow.step
    forward = [call.forward for call in group]
    replaced = one_product(step, forward, "n", forward[0])
    before = [w for i in forward for w in flow.writers[i].values() if is_cast(step.ops[w])]
    activations = [w for w in before if not step.ops[w].inputs[0].parameter]
    replaced |= dict.fromkeys(activations[1:], ())
    # Weights are cast before the merged product, which waits for them.
    replaced |= one_stream(step, [w for w in before if w not in activations], at=0)

    weight = [call.backward_weight for call in group if call.backward_weight is not None]
    if len(weight) == len(group):
        size = "m" if gemm(step, weight[0]).n == gemm(step, forward[0]).k else "n"
        replaced |= one_product(step, weight, size, max(weight))
        biases = [index for call in group if (index := bias_gradient(flow, call)) is not None]
        casts = [i for w in (*weight, *biases) for i in flow.readers[w] if is_cast(step.ops[i])]
        replaced |= one_stream(step, biases) | one_stream(step, casts)

    data = [call.backward_data for call in group if call.backward_data is not None]
    if len(data) == len(group):
        replaced |= one_product(step, data, "k", max(data))
        replaced |= dict.fromkeys(_sums(flow, data), ())
    ends = [max(rows) for rows in (data, weight) if len(rows) == len(group)]
    if ends:
        # The merged gradients read the parts' output gradients side by side.
        at = min(ends)
        outputs = sum(gemm(step, index).n for index in forward)
        replaced[at] = (_concatenation(step.ops[at], gemm(step, forward[0]), outputs), *replaced[at])
    return replaced


def _sums(flow: Flow, gradients: list[int]) -> list[int]:
    """The operations that add up the parts' data gradients: the additions, and all casts but the first."""
    sums = set(gradients)
    adds: list[int] = []
    casts: list[int] = []
    for index, entry in enumerate(flow.step.ops):
        if entry.phase != BACKWARD_DATA or not sums & set(flow.writers[index].values()):
            continue
        if is_cast(entry) or is_add(entry):
            (casts if is_cast(entry) else adds).append(index)
            sums.add(index)
        if len(adds) == len(gradients) - 1:
            break
    return adds + casts[1:]


def _concatenation(reader: StepOp, product: Gemm, outputs: int) -> StepOp:
    """The copy that puts the output gradients of the parts side by side."""
    size = product.m * outputs
    moved = size * size_bytes(product.dtype)
    return StepOp(
        Streaming("copy", size, moved, moved, product.dtype), BACKWARD_DATA, reader.site, "aten.cat"
    )
