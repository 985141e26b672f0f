"""Weights that a step multiplies again and again, and recurrent cells that run in a Python loop."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from tilefit.ops import BACKWARD_DATA, FORWARD, StepOp, Streaming
from tilefit.rules.flow import Flow, LinearCall, bias_gradient, linear_calls, parent
from tilefit.rules.layers import gemm

#: A weight used fewer times than this is shared, not looped over.
LEAST_STEPS = 8


class _Cell(NamedTuple):
    """A cell: gates, how many tensors of the state's size each operation makes in a time step (sums are those
    of the gates, and biases), and what writes the state."""

    gates: int
    does: tuple[dict[str, int], ...]
    last: frozenset[str]


_GATED = {"sigmoid": 2, "tanh": 1}
#: ``(1 - z) * n + z * h``, ``n + z * (h - n)``.
_INTERPOLATED = ({"mul": 3, "rsub": 1}, {"mul": 3, "sub": 1}, {"mul": 2, "sub": 1})
_CELLS = {
    "LSTM": _Cell(4, ({"sigmoid": 3, "tanh": 2, "mul": 3},), frozenset({"mul"})),
    "GRU": _Cell(3, tuple(_GATED | each for each in _INTERPOLATED), frozenset({"add"})),
    "RNN_TANH": _Cell(1, ({"tanh": 1},), frozenset({"tanh"})),
    "RNN_RELU": _Cell(1, ({"relu": 1},), frozenset({"relu"})),
}
#: What changes values; the rest of :data:`_CELL_OPS` moves them, or is of the backward pass.
_WORK = ("add", "sub", "rsub", "mul", "div", "sigmoid", "tanh", "relu", "neg", "where")
_FUSED_CELL = "thnn_fused_cell"
#: Between two time steps of a plain cell there is nothing but these (names without namespace and ``_``).
_CELL_OPS = frozenset(
    """add sub rsub mul div sigmoid tanh relu clone cat stack copy to_copy select_backward slice_backward
    sigmoid_backward tanh_backward threshold_backward neg zeros zeros_like
    split_backward unsafe_split_with_sizes sum new_zeros fill zero where le""".split()
)


@dataclass(frozen=True, slots=True)
class Repeated:
    """One weight in many equal forward products.

    Attributes:
        calls: The calls, in order.
        sequential: An input depends on an earlier output, so the calls cannot run at once.
    """

    calls: tuple[LinearCall, ...]
    sequential: bool


@dataclass(frozen=True, slots=True)
class CellLoop:
    """A recurrent cell in a loop over time steps.

    Attributes:
        mode: As in :class:`~tilefit.ops.Recurrent`.
        recurrent, inputs: The products with the hidden state and with the input.
        forward, backward: Operations of the loop that one recurrent layer does instead.
    """

    mode: str
    recurrent: Repeated
    inputs: Repeated
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def repeated_weights(flow: Flow) -> list[Repeated]:
    """Weights that at least :data:`LEAST_STEPS` products of one shape in one forward pass use.

    The next forward pass, as of another micro-batch, begins when the gradients of the one before are there.
    """
    step = flow.step
    forward_pass = list(
        accumulate(
            before.phase != FORWARD and entry.phase == FORWARD and not entry.recomputed
            for before, entry in pairwise((*step.ops[:1], *step.ops))
        )
    )
    calls: dict[tuple[object, ...], list[LinearCall]] = defaultdict(list)
    for call in linear_calls(step):
        entry, layer = step.ops[call.forward], call.layer
        same = layer.parameter, layer.module, entry.op, entry.recomputed, forward_pass[call.forward]
        calls[same].append(call)
    groups = [group for group in calls.values() if len(group) >= LEAST_STEPS]
    bits = {call.forward: 1 << bit for bit, group in enumerate(groups) for call in group}
    sequential = 0
    depends: Counter[int] = Counter()  # tensor -> the weights, as bits, that its value depends on
    for index, entry in enumerate(step.ops):
        if entry.phase != FORWARD:
            continue
        mask = 0
        for ref in entry.inputs:
            mask |= depends[ref.id]
        own = bits.get(index, 0)
        sequential |= mask & own
        for ref in entry.outputs:
            depends[ref.id] |= mask | own
    return [Repeated(tuple(group), bool(sequential >> bit & 1)) for bit, group in enumerate(groups)]


def cell_loops(flow: Flow) -> list[CellLoop]:
    """Loops whose body is a plain LSTM, GRU or vanilla cell, as ``torch.nn`` knows them."""
    repeated = repeated_weights(flow)
    others = [each for each in repeated if not each.sequential]
    loops = (_cell_loop(flow, each, others) for each in repeated if each.sequential)
    return [loop for loop in loops if loop is not None]


def _cell_loop(flow: Flow, recurrent: Repeated, others: list[Repeated]) -> CellLoop | None:
    layer = recurrent.calls[0].layer
    inputs = next(
        (
            other
            for other in others
            if len(other.calls) == len(recurrent.calls)
            and other.calls[0].layer.out_features == layer.out_features
            and parent(other.calls[0].layer.module) == parent(layer.module)
        ),
        None,
    )
    if inputs is None:
        return None
    products = [call.forward for call in recurrent.calls]
    between = _between(flow, products, FORWARD)
    if between is None or (mode := _mode(flow, recurrent, between)) is None:
        return None
    forward = {*products, *between, *(call.forward for call in inputs.calls)}
    backward = _backward(flow, recurrent, inputs)
    return CellLoop(mode, recurrent, inputs, tuple(sorted(forward)), tuple(sorted(backward)))


def _between(flow: Flow, products: list[int], phase: str) -> set[int] | None:
    """The cell's operations besides the products; None if one of them is none that a cell holds.

    They lie on a way from one of the products to another; before the first and after the last product,
    those of the same names and modules belong to the cell too.
    """
    step = flow.step
    own = set(products)

    def in_phase(index: int) -> bool:
        return step.ops[index].phase == phase

    both = flow.reachable(products, in_phase) & flow.needed(products, in_phase) - own
    if not all(_is_cell_op(step.ops[index]) for index in both):
        return None
    kinds = {(step.ops[index].name, step.ops[index].site.module) for index in both}

    def is_alike(index: int) -> bool:
        return in_phase(index) and (step.ops[index].name, step.ops[index].site.module) in kinds

    return both | flow.reachable(products, is_alike) | flow.needed(products, is_alike)


def _is_cell_op(entry: StepOp) -> bool:
    return isinstance(entry.op, Streaming) and (entry.function in _CELL_OPS or _FUSED_CELL in entry.function)


def _mode(flow: Flow, recurrent: Repeated, between: set[int]) -> str | None:
    """The cell that does as much of everything between two products as these operations do."""
    ops, first = flow.step.ops, recurrent.calls[0]
    gates, left = divmod(first.layer.out_features, first.layer.in_features)
    work: Counter[str] = Counter()
    for index in between:
        work[ops[index].function] += sum(ref.elements for ref in ops[index].outputs[:1])
    is_fused = any(_FUSED_CELL in name for name in work)
    state = gemm(flow.step, first.forward).m * first.layer.in_features * len(recurrent.calls)
    does = {name: round(work[name] / state) for name in _WORK if round(work[name] / state)}
    sums = does.pop("add", 0)
    for mode, cell in _CELLS.items():
        if left or gates != cell.gates:
            continue
        if is_fused and not does and not sums:
            return mode
        # A bias is added to all gates. What is added to the state would be one more, or written last.
        last = {ops[at].function for call in recurrent.calls[1:] if (at := _writer(flow, call)) is not None}
        if does in cell.does and sums % gates == 1 % gates and last <= cell.last:
            return mode
    return None


def _writer(flow: Flow, call: LinearCall) -> int | None:
    operand = flow.operand(call.forward)
    return operand[2] if operand else None


def _backward(flow: Flow, recurrent: Repeated, inputs: Repeated) -> set[int]:
    calls = (*recurrent.calls, *inputs.calls)
    gradients = [(call.backward_data, call.backward_weight, bias_gradient(flow, call)) for call in calls]
    own = {index for indices in gradients for index in indices if index is not None}
    data = [call.backward_data for call in recurrent.calls if call.backward_data is not None]
    return own | (_between(flow, data, BACKWARD_DATA) or set())
