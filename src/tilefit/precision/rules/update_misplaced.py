"""AMP005: the scaler's update in the wrong place."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, ScalerRefused, WrongDivision
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, WARNING, Alarm

_REASONS = {
    "already been called": "scaler.update() was not called since: it must end every step",
    "after step": "scaler.update() was not called since the last step: it must end every step",
    "prior to update": "scaler.update() was called without a scaler.step() since the last update",
    "No inf checks": "the optimizer had no gradients, or scaler.update() came between unscale_ and step",
}


class UpdateMisplaced(PrecisionRule):
    """`scaler.update()` comes too early, too often or not at all.

    What it sees: Gradients that are divided by the scale a second time because an `update()` between
    `unscale_` and `step` made the scaler forget that it had divided them; gradients that carry the scale from
    before an update; and the scaler's own exceptions, with what led to them.

    Why nobody notices: Dividing twice makes the gradient 65536 times too small, without a word. Adam's answer
    to that is nearly the same step.

    Wrong:

        scaler.unscale_(optimizer)
        scaler.update()
        scaler.step(optimizer)

    Right:

        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, `torch.amp.GradScaler.update`: to be called once, at the end of the iteration.
    """

    code = "AMP005"
    title = "scaler.update() is in the wrong place"
    sees = Event

    def check(self, event: Event) -> Iterator[Alarm]:
        fix = "Call scaler.update() once per step, after the last scaler.step()."
        if isinstance(event, ScalerRefused):
            reason = next((why for words, why in _REASONS.items() if words in event.error), "")
            if reason:
                yield self.alarm(event, ERROR, f"scaler.{event.method} raised: {reason}", fix, event.error)
        if not isinstance(event, WrongDivision) or event.other:
            return
        if event.kind == "again":
            yield self.alarm(
                event,
                ERROR,
                f"the gradients of {event.module} are divided by the loss scale a second time",
                fix,
                f"they become 1/{figure(event.scale)} = {figure(1 / event.scale)} of their size: an update() "
                "between unscale_ and step made the scaler forget the first division",
            )
        elif event.kind == "older":
            yield self.alarm(event, *older(event), fix)


def older(event: WrongDivision) -> tuple[str, str]:
    """Severity and message where gradients of an earlier scale are divided by a later one."""
    same = event.carried == event.scale
    carried = f"{figure(event.carried)}" if event.carried is not None else "an earlier one"
    return (
        WARNING if same else ERROR,
        f"the gradients of {event.module} carry the loss scale from before the last update ({carried}) "
        "and are "
        f"divided by the present one ({figure(event.scale)})",
    )
