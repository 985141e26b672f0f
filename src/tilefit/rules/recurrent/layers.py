"""The recurrent layers of a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from tilefit.ops import FORWARD, Recurrent, Step


def recurrent_layers(step: Step) -> dict[Recurrent, list[tuple[str, list[int]]]]:
    """The modules that run a layer, and the places of their passes in the step, by the layer (its forward
    pass)."""
    layers: dict[tuple[str, Recurrent], list[int]] = defaultdict(list)
    for index, entry in enumerate(step.ops):
        if isinstance(entry.op, Recurrent):
            layers[entry.site.module, replace(entry.op, direction=FORWARD)].append(index)
    found: dict[Recurrent, list[tuple[str, list[int]]]] = defaultdict(list)
    for (module, op), indices in layers.items():
        found[op].append((module, indices))
    return found
