"""The time of a whole step that is split over GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilefit.cost import StepEstimate, estimate_step, step_s
from tilefit.cost.collective import is_priced
from tilefit.cost.estimate import EXPOSED
from tilefit.cost.links import Fabric
from tilefit.cost.streams import exchange_s, fabric_of
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, OPTIMIZER, Collective, Program, Step
from tilefit.parallel.blocks import Block, Blocks, Framework
from tilefit.parallel.choices import Precision, TrainingSplit
from tilefit.parallel.split import SplitStep
from tilefit.parallel.training import Training
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

    Stages and micro-batches follow each other as in a plan (1F1B: :mod:`tilefit.parallel.training`), then
    comes the optimizer. Sums of gradients overlap with the last backward pass (:mod:`tilefit.cost.streams`),
    other collectives with nothing.
    """
    parts, stages = divided.split.parts, divided.stages
    # Without repeats the step is one piece: what the host is ahead in the backward pass serves the optimizer.
    whole = [estimate_step(stage, gpu) for stage in stages]
    work, rest_s, repeats = whole, 0.0, 1.0
    if parts * len(stages) > 1:
        work = [estimate_step(_part(stage, optimizer=False), gpu) for stage in stages]
        rest_s = max(step_s(_part(stage, optimizer=True), gpu) for stage in stages)
        rest_s += max(each.bound_time_s.get(EXPOSED, 0.0) for each in whole)
    slowest = max(range(len(stages)), key=lambda index: work[index].time_s)
    once = work[slowest]
    if parts * len(stages) > 1 and once.time_s:
        repeats = _scheduled_s(divided, work, gpu) / once.time_s
    return SplitEstimate(
        repeats * once.time_s + rest_s,
        repeats * once.low_s + rest_s,
        repeats * once.high_s + rest_s,
        communication_s=_communication_s(stages[slowest], whole[slowest], parts),
        bubble=1 - parts / repeats if len(stages) > 1 else 0.0,
        memory_bytes=max(stage.memory.peak_bytes for stage in stages),
        slowest=slowest,
        unpriced=sum(_unpriced(stage, gpu) for stage in stages),
        provenance=whole[slowest].provenance,
    )


def _scheduled_s(divided: SplitStep, work: Sequence[StepEstimate], gpu: Gpu) -> float:
    """Time of all micro-batches on all stages, without the optimizer."""
    blocks = []
    for stage, priced in zip(divided.stages, work, strict=True):
        forward_s = sum(
            each.time_s
            for entry, each in zip(_part(stage, optimizer=False).ops, priced.ops, strict=True)
            if entry.phase == FORWARD
        )
        # The host is ahead from the forward into the backward pass: they share what it takes.
        share_forward = forward_s / total_s if (total_s := sum(each.time_s for each in priced.ops)) else 1.0
        forward_s = share_forward * priced.time_s
        blocks.append(Block(forward_s=forward_s, backward_s=priced.time_s - forward_s))
    split = TrainingSplit(pipeline=len(blocks), micro_batches=divided.split.parts)
    model = Blocks(Block(), tuple(blocks), Block())
    return Training(model, split, Fabric(gpu), Precision(), Framework()).step_s()


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
    program = Program() if optimizer else replace(step.program, exchanges=(), order=())
    return replace(step, ops=ops, program=program)


def _unpriced(step: Step, gpu: Gpu) -> int:
    """Collectives whose link is unknown."""
    found = sum(isinstance(entry.op, Collective) and not is_priced(entry.op, gpu) for entry in step.ops)
    fabric = fabric_of(step.program, gpu)
    return found + sum(exchange_s(each, fabric) is None for each in step.program.exchanges)


def _communication_s(step: Step, estimate: StepEstimate, parts: int) -> float:
    return estimate.bound_time_s.get(EXPOSED, 0.0) + parts * sum(
        priced.time_s
        for entry, priced in zip(step.ops, estimate.ops, strict=True)
        if isinstance(entry.op, Collective)
    )
