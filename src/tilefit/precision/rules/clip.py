"""AMP001: clipping scaled gradients."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf

from tilefit.precision.events import Event, GradientsClipped
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm


class ClipOnScaled(PrecisionRule):
    """Gradients are clipped while they still carry the loss scale.

    What it sees: `clip_grad_norm_`, `clip_grad_value_` or clipping by hand between the scaled backward pass
    and `unscale_`. The scale of every gradient is followed exactly; no threshold is involved. A limit of inf,
    used to log the norm, changes nothing and is a note: the logged norm is too large by the scale.

    Why nobody notices: With a scale of 65536 a limit of 1.0 acts as 1.5e-5. Every gradient is clipped, all of
    them to the same small norm; Adam divides that out in part, and a flat loss curve hides the rest.

    Wrong:

        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Right:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, "Automatic Mixed Precision examples", working with unscaled gradients.
    """

    code = "AMP001"
    title = "gradients are clipped before they are unscaled"
    sees = GradientsClipped

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, GradientsClipped)
        fix = "Call scaler.unscale_(optimizer) after backward() and before clipping."
        if event.limit is None:
            yield self.alarm(
                event,
                ERROR if event.certain else WARNING,
                "gradients are scaled by a factor made from their own norm while they carry the loss "
                "scale of "
                f"{figure(event.scale)}",
                fix,
            )
        elif isinf(event.limit):
            yield self.alarm(
                event,
                NOTE,
                f"the norm that is computed here is {figure(event.scale)} times the gradients' own: they "
                "still "
                "carry the loss scale",
                fix,
            )
        else:
            yield self.alarm(
                event,
                ERROR,
                f"clipped at {figure(event.limit)} while the gradients carry a loss scale of "
                f"{figure(event.scale)}",
                fix,
                f"effective limit {figure(event.limit)} / {figure(event.scale)} = "
                f"{figure(event.limit / event.scale)}",
            )
