"""AMP029: a scale that falls without end."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, ScaleHistory
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, Alarm


class ScaleCollapse(PrecisionRule):
    """Every step is skipped, because the loss itself is not finite at any scale.

    What it sees: Steps skipped in a row, and losses that were not finite before they were scaled; or a scale
    below 1. Skipped steps alone are normal: a scale that starts at 2^24 takes six to settle.

    Why nobody notices: The scaler skips, halves the scale and goes on, without a message, until the scale is
    0. The weights are never touched.

    Wrong:

        loss = f(x)                      # NaN at any scale
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Right:

        assert torch.isfinite(loss)      # while looking for the cause; AMP026 names it

    Source: PyTorch, `torch.amp.GradScaler.update`: the scale is not guaranteed to stay above 1.
    """

    code = "AMP029"
    title = "the loss scale collapses"
    sees = ScaleHistory

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, ScaleHistory)
        if event.loss_finite is False or event.scale < 1:
            yield self.alarm(
                event,
                ERROR,
                f"{event.skipped} steps in a row were skipped: the loss is not finite before it is scaled"
                if event.loss_finite is False
                else f"the loss scale has fallen to {figure(event.scale)}: step after step was skipped",
                "Find where the inf or NaN comes from: the scale is not its cause (see AMP026).",
                f"scale {figure(event.scale)}; nothing has been learnt in these steps",
            )
