"""The recurrent layers of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from tilefit.ops import BACKWARD_DATA, FORWARD, Recurrent, Step
from tilefit.ops.recurrent import INFERENCE, TRAINING
from tilefit.rules.base import Replaced

#: Modules that run a layer, and the places of their passes in the step, by the layer (its forward pass).
Layers = dict[Recurrent, list[tuple[str, list[int]]]]


def recurrent_layers(step: Step) -> Layers:
    """All of them."""
    layers: dict[tuple[str, Recurrent], list[int]] = defaultdict(list)
    for index, entry, op in step.each(Recurrent):
        layers[entry.site.module, replace(op, direction=FORWARD)].append(index)
    by_layer: Layers = defaultdict(list)
    for (module, layer), indices in layers.items():
        by_layer[layer].append((module, indices))
    return by_layer


def layers_of_torch(step: Step) -> Layers:
    """Those of ``torch.nn``, by what they would be as layers of ``tilefit.nn``."""
    by_layer: Layers = defaultdict(list)
    for op, places in recurrent_layers(step).items():
        for module, indices in [] if op.persistent else places:
            trained = any(step.ops[index].phase == BACKWARD_DATA for index in indices)
            ours = replace(op, persistent=TRAINING if trained else INFERENCE)
            by_layer[ours].append((module, indices))
    return by_layer


def exchanged(
    step: Step, places: Iterable[tuple[str, list[int]]], into: Callable[[Recurrent], Iterable[Recurrent]]
) -> Replaced:
    """The passes of a layer at these places with what becomes of each."""
    entries = {index: step.ops[index] for _, indices in places for index in indices}
    return {
        index: tuple(replace(entry, op=new) for new in into(entry.op))  # type: ignore[arg-type]
        for index, entry in entries.items()
    }
