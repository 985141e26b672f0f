"""The time of a whole step that is split over GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilefit.cost import StepEstimate, estimate_step
from tilefit.cost.collective import is_priced
from tilefit.cost.estimate import EXPOSED
from tilefit.cost.streams import exchange_s, fabric_of
from tilefit.gpus import Gpu
from tilefit.ops import OPTIMIZER, Collective, Step
from tilefit.parallel.split import SplitStep
from tilefit.units import seconds, share


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """Predicted time of a step that is split.

    Attributes:
        time_s, low_s, high_s: Wall time of the whole step, and the 80 % interval.
        communication_s: Of it, communication on the stage that takes longest that nothing hides, where it is
            priced.
        bubble: Share of the time in which a stage waits for the pipeline to fill and to drain.
        memory_bytes: The most that one GPU holds.
        slowest: Which stage the others wait for.
        unpriced: Collectives whose link is unknown; they are left out of the time.
        provenance: What most of the time rests on.
    """

    time_s: float
    low_s: float
    high_s: float
    communication_s: float
    bubble: float
    memory_bytes: int
    slowest: int
    unpriced: int
    provenance: str


def estimate_split(divided: SplitStep, gpu: Gpu) -> SplitEstimate:
    """Predicted time of a step as it is split.

    With p stages and m micro-batches the slowest stage works ``m`` times and waits ``p - 1`` times as long:
    ``(m + p - 1)`` times its time for one micro-batch, then the optimizer (Huang and others, "GPipe:
    Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019). Sums of gradients overlap
    with the last backward pass (:mod:`tilefit.cost.streams`), other collectives with nothing.
    """
    parts, count = divided.split.parts, len(divided.stages)
    repeats = parts + count - 1
    # Without repeats the step is one piece: what the host is ahead in the backward pass serves the optimizer.
    whole = [estimate_step(stage, gpu) for stage in divided.stages]
    if repeats == 1:
        slowest = 0
        time_s, low_s, high_s = whole[0].time_s, whole[0].low_s, whole[0].high_s
    else:
        work = [estimate_step(_part(stage, optimizer=False), gpu) for stage in divided.stages]
        rest = [estimate_step(_part(stage, optimizer=True), gpu) for stage in divided.stages]
        slowest = max(range(count), key=lambda index: work[index].time_s)
        once, last = work[slowest], max(rest, key=lambda each: each.time_s)
        sums_s = max(_exposed_s(each) for each in whole)
        time_s = repeats * once.time_s + last.time_s + sums_s
        low_s = repeats * once.low_s + last.low_s + sums_s
        high_s = repeats * once.high_s + last.high_s + sums_s
    return SplitEstimate(
        time_s,
        low_s,
        high_s,
        communication_s=_communication_s(divided.stages[slowest], whole[slowest], parts),
        bubble=(count - 1) / repeats,
        memory_bytes=max(stage.memory.peak_bytes for stage in divided.stages),
        slowest=slowest,
        unpriced=sum(_unpriced(stage, gpu) for stage in divided.stages),
        provenance=whole[slowest].provenance,
    )


def rank_step(divided: SplitStep, gpus: Sequence[Gpu]) -> Step:
    """The step of one GPU, to be checked: of the stage that the others wait for, with notes on the whole.

    Args:
        divided: The step as it is split.
        gpus: Which GPUs; the first decides which stage takes longest, the notes tell the time on each.
    """
    priced = [(gpu, estimate_split(divided, gpu)) for gpu in gpus]
    stage = divided.stages[priced[0][1].slowest]
    split = divided.split
    notes = [f"Split: {split}; {split.gpus} GPUs, of which this is one."]
    if split.pipeline > 1 or split.parts > 1:
        notes.append(f"This is one micro-batch on stage {priced[0][1].slowest + 1} of {split.pipeline}.")
    for gpu, each in priced:
        said = f"The whole step on {gpu.title}: {seconds(each.time_s)}"
        if each.communication_s:
            said += f", of which communication {seconds(each.communication_s)}"
        if each.bubble:
            said += f", pipeline bubble {share(each.bubble)}"
        if each.unpriced:
            said += "; communication over a link that is unknown is not priced"
        notes.append(f"{said}.")
    notes += [*divided.notes, *(f"{problem[0].upper()}{problem[1:]}." for problem in divided.problems)]
    return replace(stage, notes=(*stage.notes, *notes))


def _part(step: Step, *, optimizer: bool) -> Step:
    """What is done once for a step, or for each micro-batch, which has the program's copies and waits."""
    ops = tuple(entry for entry in step.ops if (entry.phase == OPTIMIZER) == optimizer)
    program = replace(step.program, exchanges=(), order=()) if step.program else None
    return replace(step, ops=ops, program=None if optimizer else program)


def _exposed_s(estimate: StepEstimate) -> float:
    return estimate.bound_time_s.get(EXPOSED, 0.0)


def _unpriced(step: Step, gpu: Gpu) -> int:
    """Collectives whose link is unknown."""
    found = sum(isinstance(entry.op, Collective) and not is_priced(entry.op, gpu) for entry in step.ops)
    program = step.program
    if program is None:
        return found
    fabric = fabric_of(program, gpu)
    return found + sum(exchange_s(each, fabric) is None for each in program.exchanges)


def _communication_s(step: Step, estimate: StepEstimate, parts: int) -> float:
    return _exposed_s(estimate) + parts * sum(
        priced.time_s
        for entry, priced in zip(step.ops, estimate.ops, strict=True)
        if isinstance(entry.op, Collective)
    )
