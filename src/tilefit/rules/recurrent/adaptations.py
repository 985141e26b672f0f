"""What it takes for cuDNN to run a recurrent layer by its persistent algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tilefit.cost.cudnn import STANDARD, cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.ops import Recurrent
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.resize import pad


def _split(op: Recurrent) -> list[Recurrent]:
    """One module per layer and direction."""
    single = replace(op, num_layers=1, bidirectional=False)
    wide = op.output_size * op.directions
    layers = [single] + [replace(single, input_size=wide)] * (op.num_layers - 1)
    return [layer for layer in layers for _ in range(op.directions)]


class Adaptation(NamedTuple):
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
_ADAPTATIONS = (
    Adaptation(
        "pass a padded tensor, not a PackedSequence (mask the padding in the loss)",
        UNSAFE,
        sets={"packed": False, "rows": 0},
    ),
    Adaptation("run it under fp16 autocast", UNSAFE, sets={"dtype": "fp16"}),
    Adaptation("make the hidden size {op.hidden_size}", UNSAFE, pads={"hidden_size": 128}),
    Adaptation("use a module per layer and direction", SAFE, splits=True),
    Adaptation("pad the input to {op.input_size} features", SAFE, pads={"input_size": 128}),
    Adaptation("pad the mini-batch to {op.batch}", SAFE, pads={"batch": 8}),
)


def advice(op: Recurrent, changes: list[Adaptation]) -> str:
    """Changes in words, with the sizes that they lead to."""
    after = applied(op, changes)[0]  # the others read what this one makes
    return "; ".join(change.advice.format(op=after) for change in changes)


def applied(op: Recurrent, changes: list[Adaptation]) -> list[Recurrent]:
    """The layers that a layer becomes."""
    ops = [op]
    for change in changes:
        ops = [new for old in ops for new in change.apply(old)]
    return ops


def fewest(op: Recurrent, gpu: Gpu, directions: set[str]) -> list[Adaptation]:
    """A smallest set of changes that lets every pass persist; empty if not even all of them do."""

    def persists(changes: list[Adaptation]) -> bool:
        return all(
            cudnn_algorithm(replace(new, direction=direction), gpu)[0] != STANDARD
            for direction in directions
            for new in applied(op, changes)
        )

    changes = list(_ADAPTATIONS)
    if not persists(changes):
        return []
    for change in _ADAPTATIONS:
        without = [other for other in changes if other is not change]
        if persists(without):
            changes = without
    return changes
