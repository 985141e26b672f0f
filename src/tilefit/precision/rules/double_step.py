"""AMP004: stepping twice on the same gradients."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, RepeatedStep
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import ERROR, Alarm


class DoubleStep(PrecisionRule):
    """The optimizer steps again on gradients that it has used already.

    What it sees: An optimizer step although no backward pass, and nothing else, has written to any gradient
    of the optimizer since its last step. A second backward pass between two steps, as in SAM, is fine.

    Why nobody notices: The weights move twice as far, in the right direction. And where the scaler has
    skipped the step because of inf, the second one applies the inf.

    Wrong:

        scaler.step(optimizer)
        scaler.update()
        optimizer.step()

    Right:

        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, `torch.amp.GradScaler.step`: it calls `optimizer.step()` itself.
    """

    code = "AMP004"
    title = "the optimizer steps twice on the same gradients"
    sees = RepeatedStep

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, RepeatedStep)
        effect = (
            "the scaler had skipped the step because of inf or NaN in them"
            if event.skipped
            else "no gradient has changed since its last step"
        )
        divided = ("they are divided by the loss scale a second time",) if event.scaler else ()
        yield self.alarm(
            event,
            ERROR,
            f"{event.module} steps again on gradients it has used already",
            "Remove one of the two steps: scaler.step(optimizer) calls optimizer.step() itself.",
            effect,
            *divided,
        )
