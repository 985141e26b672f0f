"""AMP021: schedules that go on without the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, SchedulerStepped
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import NOTE, WARNING, Alarm

#: So many skipped steps at the start are the scale finding its level.
SETTLING = 3


class ScheduleAdvancesOnSkip(PrecisionRule):
    """The learning-rate schedule advances on steps that the scaler skipped.

    What it sees: A scheduler that steps once per optimizer step stepped after a step that the scaler had
    skipped. Up to three such steps are a note: the scale settles at the start of most runs.

    Why nobody notices: The warmup is shorter by the skipped steps. PyTorch warns only if the very first step
    is skipped, and names another cause.

    Wrong:

        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    Right:

        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()

    Source: PyTorch, `torch.amp.GradScaler.step`: the step is skipped where gradients are inf or NaN.
    """

    code = "AMP021"
    title = "the schedule advances on skipped steps"
    sees = SchedulerStepped

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, SchedulerStepped)
        yield self.alarm(
            event,
            NOTE if event.skipped <= SETTLING else WARNING,
            "the schedule advances although the scaler skipped the optimizer's step",
            "Step the scheduler only if the scale did not shrink: scaler.get_scale() >= the scale before.",
            f"{event.skipped} of {event.steps} steps so far",
        )
