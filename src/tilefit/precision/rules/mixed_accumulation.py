"""AMP006: scaled and unscaled parts in one gradient."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, MixedLoss, WrongDivision
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, Alarm


class MixedAccumulation(PrecisionRule):
    """A gradient is the sum of parts that carry different scales.

    What it sees: The gradients that one `unscale_` or step consumes come from backward passes with and
    without a scale, or with scales of different generations; or a loss is the sum of a scaled and an unscaled
    part. Gradients are judged when they are used: what is cleared before does not count.

    Why nobody notices: One part is too small by the scale, so it is as if it were not there. With
    accumulation that leaves the last micro-batch; with an auxiliary loss it leaves the main one.

    Wrong:

        for batch in micro_batches:
            scaler.scale(loss(batch) / k).backward()
            scaler.unscale_(optimizer)
            scaler.update()
        scaler.step(optimizer)

    Right:

        for batch in micro_batches:
            scaler.scale(loss(batch) / k).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, "Automatic Mixed Precision examples", gradient accumulation: the scale must stay the same
    while gradients accumulate.
    """

    code = "AMP006"
    title = "scaled and unscaled gradients are mixed"
    sees = Event

    def check(self, event: Event) -> Iterator[Alarm]:
        if isinstance(event, MixedLoss):
            yield self.alarm(
                event,
                ERROR,
                "the loss is a sum of which only a part is scaled",
                "Add the losses first and scale the sum: scaler.scale(loss1 + loss2).",
                f"the other part counts 1/{figure(event.scale)} = {figure(1 / event.scale)} of itself",
            )
        if not isinstance(event, WrongDivision):
            return
        smaller = f"that part counts 1/{figure(event.scale)} = {figure(1 / event.scale)} of itself"
        if event.kind == "mixed":
            yield self.alarm(
                event,
                ERROR,
                f"{event.parameters} gradients of {event.module} are sums of a scaled part and an "
                "unscaled one",
                "Scale every loss whose gradients add up, and unscale once, after the last backward().",
                smaller,
            )
        elif event.kind == "generations":
            yield self.alarm(
                event,
                ERROR,
                f"{event.parameters} gradients of {event.module} are sums of parts with different loss "
                "scales",
                "Call scaler.update() only after the step that uses the accumulated gradients.",
            )
        elif event.kind == "plain":
            yield self.alarm(
                event,
                ERROR,
                f"{event.parameters} gradients of {event.module} are divided by the loss scale and were "
                "never "
                "multiplied by it",
                "Call scaler.scale(loss).backward() for every loss this optimizer learns from.",
                smaller,
            )
