"""AMP002: changing scaled gradients."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, GradientsWritten
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, Alarm


class PenaltyOnScaled(PrecisionRule):
    """Something is added to, clamped in or put in place of gradients that still carry the loss scale.

    What it sees: Between the scaled backward pass and `unscale_`, an operation that writes to a gradient and
    does not commute with the scale: a penalty, noise, `clamp_`, `nan_to_num_`, a gradient replaced by a
    function of itself. What commutes is fine: averaging over ranks, multiplying by a number or a mask,
    clearing, dividing by the scale by hand.

    Why nobody notices: The optimizer divides what was added by the scale: with 65536, a weight decay of 1e-3
    acts as 1.5e-8. And `nan_to_num_` hides from the scaler the inf it must see to skip the step.

    Wrong:

        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad.add_(p.sign(), alpha=1e-3)
        scaler.step(optimizer)

    Right:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.add_(p.sign(), alpha=1e-3)
        scaler.step(optimizer)

    Source: PyTorch, "Automatic Mixed Precision examples", gradient penalty.
    """

    code = "AMP002"
    title = "scaled gradients are changed"
    sees = GradientsWritten

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, GradientsWritten)
        by = f"by {event.operation}" if event.operation else "by hand"
        yield self.alarm(
            event,
            ERROR,
            f"{event.parameters} gradients are changed {by} while they carry a loss scale of "
            f"{figure(event.scale)}",
            "Call scaler.unscale_(optimizer) first, or put the term into the loss.",
            f"what is added here acts as 1/{figure(event.scale)} = {figure(1 / event.scale)} of itself; an "
            "inf or NaN removed here is hidden from the scaler",
        )
