"""Pipeline parallelism: the layers of a step, a part of them on each stage."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import prod

from tilefit.errors import UsageError
from tilefit.ops import FORWARD, OPTIMIZER, Collective, Step, StepOp
from tilefit.ops.collective import SEND

_NUMBERED = re.compile(r"^(.*?)\.?\b(\d+)(?:\.|$)")


def stages(step: Step, count: int, micro_batches: int) -> tuple[Step, ...]:
    """The step of each stage; each ends its forward pass by sending its result on, and its backward pass too.

    The layers are the modules of the numbered list that holds the most arithmetic (``transformer.h.0`` and so
    on); the first stages get one more where they do not divide. What runs before the first layer belongs to
    the first stage, what runs after the last to the last, and what belongs to no layer to the one that ran
    before. Operations of the optimizer are divided by the parameters. Parameters that stages share (tied
    embeddings) are held by each of them. Of the micro-batches a stage holds the activations of as many as
    there are stages from it on (the schedule called 1F1B: Narayanan and others, "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2).

    Args:
        step: One micro-batch's step.
        count: How many stages.
        micro_batches: How many micro-batches follow each other.

    Raises:
        UsageError: the step has fewer layers than stages.
    """
    prefix, layers = layers_of(step)
    if layers < count:
        raise UsageError(
            f"{layers} layers do not fill {count} pipeline stages"
            if layers
            else "the step has no list of layers",
            hint="Take fewer stages.",
        )
    of_layer = [stage for stage in range(count) for _ in range(layers // count + (stage < layers % count))]
    of_place = [0, *of_layer, count - 1]
    stage_of = [of_place[place] for place in places(step, prefix, layers)]
    names = [_names(step, stage_of, stage) for stage in range(count)]
    total = sum(prod(p.shape) for p in step.parameters.values())
    written = _written(step, stage_of, count)
    crossings = _crossings(step, stage_of)
    made = []
    for stage in range(count):
        parameters = {name: p for name, p in step.parameters.items() if name in names[stage]}
        share = sum(prod(p.shape) for p in parameters.values()) / total if total else 1.0
        ops: list[StepOp] = []
        for index, entry in enumerate(step.ops):
            if entry.phase == OPTIMIZER:
                ops.append(entry.shared(share, share))
            elif stage_of[index] == stage:
                ops.append(entry)
                if index in crossings:
                    ops.append(crossings[index])
        held = min(count - stage, micro_batches) * written[stage]
        memory = step.memory.part(share, held)
        made.append(replace(step, ops=tuple(ops), parameters=parameters, memory=memory))
    return tuple(made)


def layers_of(step: Step) -> tuple[str, int]:
    """The path of the list of layers, and how many there are; none: 0."""
    flop: Counter[str] = Counter()
    numbers: dict[str, set[int]] = {}
    for entry in step.ops:
        if match := _NUMBERED.match(entry.site.module):
            flop[match[1]] += entry.op.flop
            numbers.setdefault(match[1], set()).add(int(match[2]))
    if not flop:
        return "", 0
    prefix = flop.most_common(1)[0][0]
    return prefix, max(numbers[prefix]) + 1


def layer_of(prefix: str, name: str) -> int | None:
    """Which layer of the list a module, or a parameter by its name, belongs to."""
    match = _NUMBERED.match(name)
    return int(match[2]) if match and match[1] == prefix else None


def places(step: Step, prefix: str, layers: int) -> list[int]:
    """The block of every operation: 0 before the first layer, then the layers, then what follows them.

    What belongs to no layer and runs between two belongs to the one that ran before.
    """
    found = [layer_of(prefix, entry.site.module) for entry in step.ops]
    within = [(i, step.ops[i].phase == FORWARD) for i, layer in enumerate(found) if layer is not None]
    last_forward = max((i for i, forward in within if forward), default=-1)
    first_backward = min((i for i, forward in within if not forward), default=len(found))
    last_backward = max((i for i, _ in within), default=-1)
    made = []
    current = 0
    for index, layer in enumerate(found):
        if layer is not None:
            current = layer + 1
        elif last_forward < index < first_backward:
            current = layers + 1
        elif index > last_backward:
            current = 0
        made.append(current)
    return made


def _names(step: Step, places: list[int], stage: int) -> set[str]:
    """Parameters that the operations of a stage read."""
    return {
        ref.parameter
        for entry, place in zip(step.ops, places, strict=True)
        if place == stage and entry.phase != OPTIMIZER
        for ref in entry.inputs
        if ref.parameter
    }


def _crossings(step: Step, places: list[int]) -> dict[int, StepOp]:
    """Behind which operations a stage sends what to the next, or in the backward pass to the one before."""
    found = {}
    watched = [i for i, entry in enumerate(step.ops) if entry.phase != OPTIMIZER]
    for here, there in pairwise(watched):
        if places[here] == places[there]:
            continue
        entry = step.ops[here]
        largest = max((*entry.outputs, *entry.inputs), key=lambda ref: ref.elements, default=None)
        if largest is not None:
            op = Collective(SEND, max(1, largest.elements), 2, largest.dtype)
            found[here] = StepOp(op, entry.phase, entry.site, SEND, (largest,), ())
    return found


def _written(step: Step, places: list[int], count: int) -> list[float]:
    """Each stage's share of what the forward pass writes."""
    bytes_ = [0] * count
    for entry, place in zip(step.ops, places, strict=True):
        if entry.phase == FORWARD:
            bytes_[place] += sum(ref.bytes for ref in entry.outputs)
    total = sum(bytes_)
    return [each / total if total else 1.0 for each in bytes_]
