"""RNN002: a Python loop over time steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent, StepOp
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.flow import Flow, is_add, is_cast
from tilefit.rules.merging import together
from tilefit.rules.recurrent.loops import CellLoop, cell_loops

_WIDENING = ("aten.select_backward", "aten.slice_backward")


class PythonLoop(Rule):
    """A recurrent cell runs in a Python loop, one time step at a time.

    What it sees: The same recurrent weight in at least eight products in sequence, each waiting for the
    one before, with nothing in between but what a plain LSTM, GRU or vanilla cell computes: `nn.LSTMCell`,
    `nn.GRUCell`, `nn.RNNCell`, or the same written by hand. Cells with normalisation, dropout or feedback
    from a later layer are left alone: no `torch.nn` layer computes them.

    Why it costs time: Each time step launches its products and pointwise operations from Python, each on
    a mini-batch of rows. The input products do not depend on one another and could be one; in the backward
    pass each step makes its own weight gradient and adds it to the sum.

    Arithmetic: T steps of the cell become one layer of T steps: one input product over `T B` rows, one
    weight gradient over `T B` rows, and what cuDNN's algorithm costs per step (see RNN001). A plain PyTorch
    loop takes about 145 us per time step, cuDNN's algorithms 2 to 14.

    Example: `outputs, _ = nn.LSTM(d, h)(x)` in place of `for t in range(len(x)): h, c = cell(x[t], (h, c))`;
    the weights have the same shapes and gate order.

    Source: Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on
    GPUs" (2016).
    """

    code = "RNN002"
    title = "recurrent cell in a Python loop"
    wrong = Case(
        "Loop()",
        "torch.empty(64, 16, 256)",
        code="""
        class Loop(nn.Module):
            def __init__(self, features=256):
                super().__init__()
                self.cell = nn.LSTMCell(features, features)

            def forward(self, x):
                state = x.new_zeros(2, *x.shape[1:]).unbind()
                outputs = []
                for step in x:
                    state = self.cell(step, state)
                    outputs.append(state[0])
                return torch.stack(outputs)
        """,
    )
    right = wrong.but("Loop()", "nn.LSTM(256, 256)")

    def check(self, context: Context) -> Proposals:
        flow = Flow(context.step)
        by_layer: dict[Recurrent, list[CellLoop]] = defaultdict(list)
        for loop in cell_loops(flow):
            by_layer[_layer(flow, loop)].append(loop)
        for layer, loops in by_layer.items():
            replaced: Edits = {}
            for loop in loops:
                replaced.update(_replaced(flow, loop, layer))
            kernels = len(_absorbed(flow, loops[0]))
            cells = [loop.recurrent.calls[0].layer for loop in loops]
            name = {"RNN_TANH": "RNN", "RNN_RELU": 'RNN(nonlinearity="relu")'}.get(layer.mode, layer.mode)
            yield Proposal(
                place=Place.of(cells, sites=len(loops)),
                message=f"{'a' if layer.mode == 'GRU' else 'an'} {layer.mode} cell runs {layer.seq_len} time "
                f"steps in a Python loop, {kernels:,} kernels in all",
                fix=f"Use nn.{name} over the whole sequence; the cell's weights fit it.",
                safety=SAFE,
                change=Change(replaced),
                arithmetic=(f"{layer.seq_len} steps of {layer.batch} rows -> one layer {layer.shape}",),
            )


def _layer(flow: Flow, loop: CellLoop) -> Recurrent:
    recurrent = loop.recurrent.calls[0]
    product = flow.step.ops[recurrent.forward].op
    return Recurrent(
        mode=loop.mode,
        input_size=loop.inputs.calls[0].layer.in_features,
        hidden_size=recurrent.layer.in_features,
        seq_len=len(loop.recurrent.calls),
        batch=product.m,  # type: ignore[attr-defined]
        dtype=product.dtype,
    )


def _absorbed(flow: Flow, loop: CellLoop) -> set[int]:
    """The loop's operations and those that serve nothing else."""
    step = flow.step
    own = {*loop.forward, *loop.backward}
    # Gradients of weights and inputs, summed over the steps.
    for index, entry in enumerate(step.ops):
        if entry.phase in (BACKWARD_DATA, BACKWARD_WEIGHT) and (is_add(entry) or entry.name in _WIDENING):
            writers = flow.writers[index]
            if len(writers) == len({ref.id for ref in entry.inputs}) and own.issuperset(writers.values()):
                own.add(index)
    return own


def _replaced(flow: Flow, loop: CellLoop, layer: Recurrent) -> Edits:
    step = flow.step
    own = _absorbed(flow, loop)
    replaced: Edits = dict.fromkeys(own, ())
    first = loop.recurrent.calls[0].forward
    at = step.ops[first]
    new = [StepOp(layer, FORWARD, at.site, f"aten.{layer.mode.lower()}")]
    casts = [
        index
        for index in {w for i in loop.forward for w in flow.writers[i].values()}
        if is_cast(step.ops[index])
        and not step.ops[index].inputs[0].parameter
        and own.issuperset(flow.readers[index])
    ]
    if casts:
        replaced.update((index, ()) for index in casts)
        new.insert(0, together([step.ops[index] for index in casts]))
    replaced[first] = tuple(new)
    if loop.backward:
        replaced[max(loop.backward)] = tuple(
            StepOp(
                replace(layer, direction=direction), direction, at.site, f"aten.{layer.mode.lower()}_backward"
            )
            for direction in (BACKWARD_DATA, BACKWARD_WEIGHT)
        )
    return replaced
