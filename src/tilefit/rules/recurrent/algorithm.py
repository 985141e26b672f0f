"""RNN001: cuDNN cannot use its persistent algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tilefit.cost.cudnn import STANDARD, cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_WEIGHT, Recurrent
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.recurrent.layers import exchanged, recurrent_layers
from tilefit.rules.resize import pad


def _split(op: Recurrent) -> list[Recurrent]:
    """One module per layer and direction."""
    single = replace(op, num_layers=1, bidirectional=False)
    wide = op.output_size * op.directions
    layers = [single] + [replace(single, input_size=wide)] * (op.num_layers - 1)
    return [layer for layer in layers for _ in range(op.directions)]


class _Change(NamedTuple):
    """A change to a layer: what to tell the user, whether it is safe, and which fields it sets or pads to a
    multiple; or it splits the layer."""

    advice: str
    safety: str
    sets: Mapping[str, Any] = {}
    pads: Mapping[str, int] = {}
    splits: bool = False

    def apply(self, op: Recurrent) -> list[Recurrent]:
        """The layers that a layer becomes."""
        if self.splits:
            return _split(op)
        sizes: dict[str, Any] = {
            name: pad(getattr(op, name), multiple) for name, multiple in self.pads.items()
        }
        return [replace(op, **self.sets, **sizes)]


#: The changes that can meet a condition, in the order they are made.
_CHANGES = (
    _Change(
        "pass a padded tensor, not a PackedSequence (mask the padding in the loss)",
        UNSAFE,
        sets={"packed": False, "rows": 0},
    ),
    _Change("run it under fp16 autocast", UNSAFE, sets={"dtype": "fp16"}),
    _Change("make the hidden size {op.hidden_size}", UNSAFE, pads={"hidden_size": 128}),
    _Change("use a module per layer and direction", SAFE, splits=True),
    _Change("pad the input to {op.input_size} features", SAFE, pads={"input_size": 128}),
    _Change("pad the mini-batch to {op.batch}", SAFE, pads={"batch": 8}),
)


class PersistentAlgorithm(Rule):
    """A recurrent layer misses a condition of cuDNN's persistent algorithm.

    What it sees: A layer for which PyTorch asks cuDNN for its standard algorithm, although a change
    of element type, sizes or module structure would let it ask for the persistent one. The finding names
    the algorithm that runs, the condition that fails, and the smallest set of changes that meets all.

    Why it costs time: The standard algorithm launches a product and a pointwise kernel for every time
    step, and every product loads the recurrent weights again. The persistent algorithm is one kernel that
    keeps the weights on chip for the whole sequence.

    Arithmetic: PyTorch asks for the persistent algorithm in fp16 only, for one layer and one direction,
    no projection, no PackedSequence, hidden size at most 1024, hidden and input size multiples of 128. On
    compute capability 8.0 and later with at least 98 SMs: never for a GRU; LSTM with a mini-batch that is a
    multiple of 8 and at most 128. On an H200 an LSTM of 1024 units at mini-batch 16 takes 2.3 us per time
    step, of 1152 units 13.7. It does not always pay: at mini-batch 128 the standard algorithm can win, and
    the rule is then silent.

    Example: Two stacked `nn.LSTM(d, d)` in place of `nn.LSTM(d, d, num_layers=2)`; mini-batch 16 in
    place of 12.

    Source: PyTorch, `aten/src/ATen/native/cudnn/RNN.cpp`, `get_algo`.
    """

    code = "RNN001"
    title = "cuDNN's persistent algorithm is out of reach"
    wrong = Case("nn.LSTM(1024, 1024)", "torch.empty(256, 12, 1024)", "--amp fp16")
    right = wrong.but("12", "16")

    def check(self, context: Context) -> Proposals:
        step, gpu = context.step, context.gpu
        for op, places in recurrent_layers(step).items():
            algorithm, reason = cudnn_algorithm(op, gpu)
            if algorithm != STANDARD:
                continue
            directions = {step.ops[i].op.direction for _, rows in places for i in rows}  # type: ignore[attr-defined]
            changes = _fewest(op, gpu, directions - {BACKWARD_WEIGHT})
            if not changes:
                continue
            replaced = exchanged(step, places, partial(_applied, changes=changes))
            after = _applied(op, changes)[0]
            advice = _advice(op, changes)
            yield Proposal(
                place=context.place(rows[0] for _, rows in places),
                message=f"cuDNN runs its {algorithm} algorithm: {reason}",
                fix=advice[0].upper() + advice[1:] + ".",
                safety=UNSAFE if any(change.safety == UNSAFE for change in changes) else SAFE,
                change=Change(replaced),
                arithmetic=(
                    f"{op.shape}, {op.dtype}: {algorithm}, a product and a pointwise kernel per time step",
                    f"{after.shape}, {after.dtype}: {cudnn_algorithm(after, gpu)[0]}, one kernel",
                ),
            )


def cheapest_change(op: Recurrent, gpu: Gpu, directions: set[str]) -> str:
    """The fewest changes with which cuDNN's persistent algorithm runs every pass; empty if there are none."""
    return _advice(op, _fewest(op, gpu, directions))


def _advice(op: Recurrent, changes: list[_Change]) -> str:
    after = _applied(op, changes)[0]  # the others read what this one makes
    return "; ".join(change.advice.format(op=after) for change in changes)


def _applied(op: Recurrent, changes: list[_Change]) -> list[Recurrent]:
    ops = [op]
    for change in changes:
        ops = [new for old in ops for new in change.apply(old)]
    return ops


def _fewest(op: Recurrent, gpu: Gpu, directions: set[str]) -> list[_Change]:
    """A smallest set of changes that lets every pass persist; empty if not even all of them do."""

    def persists(changes: list[_Change]) -> bool:
        return all(
            cudnn_algorithm(replace(new, direction=direction), gpu)[0] != STANDARD
            for direction in directions
            for new in _applied(op, changes)
        )

    changes = list(_CHANGES)
    if not persists(changes):
        return []
    for change in _CHANGES:
        without = [other for other in changes if other is not change]
        if persists(without):
            changes = without
    return changes
