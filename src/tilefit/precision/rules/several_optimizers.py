"""AMP019: one scaler, several optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, WrongDivision
from tilefit.precision.rules.base import PrecisionRule
from tilefit.precision.rules.update_misplaced import older
from tilefit.rules.finding import Alarm


class OneScalerManyOptimizers(PrecisionRule):
    """The scaler is updated between the steps of two optimizers that learn from the same backward pass.

    What it sees: The gradients of an optimizer carry the scale from before an update, and another optimizer
    stepped in between. It is an error where the scale has changed, else a warning: it will.

    Why nobody notices: Most updates leave the scale as it is. Every 2000 steps, and at each overflow, the
    second optimizer's gradients are divided by twice or half of what they carry.

    Wrong:

        scaler.step(optimizer1); scaler.update()
        scaler.step(optimizer2); scaler.update()

    Right:

        scaler.step(optimizer1)
        scaler.step(optimizer2)
        scaler.update()

    Source: PyTorch, "Automatic Mixed Precision examples", working with multiple models, losses, and
    optimizers.
    """

    code = "AMP019"
    title = "one scaler is updated between two optimizers"
    sees = WrongDivision

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, WrongDivision)
        if event.kind == "older" and event.other:
            yield self.alarm(
                event,
                *older(event),
                "Call scaler.update() once, after the last optimizer's step.",
                f"{event.other} stepped, and the scaler was updated, in between",
            )
