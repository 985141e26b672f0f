"""AMP022: half-precision weights under autocast."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, HalfWeights, ScalerRefused
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import NOTE, Alarm


class HalfWeightsUnderAutocast(PrecisionRule):
    """The weights that are trained are in half precision, and autocast is used on top.

    What it sees: More than half of the weights of two and more dimensions that an optimizer holds are fp16 or
    bf16 while forward passes run under autocast; and the scaler's exception that follows from it. Frozen
    half-precision weights below fp32 adapters are fine.

    Why nobody notices: Where the scaler refuses ("Attempting to unscale FP16 gradients"), the usual answer is
    to switch the scaler off, which removes the message and leaves the small updates to be rounded away. With
    bf16 nothing is said at all.

    Wrong:

        model.half()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)

    Right:

        with torch.autocast("cuda", dtype=torch.float16):   # the weights stay fp32
            loss = model(x)

    Source: PyTorch, "Automatic Mixed Precision package": do not call half() on the model.
    """

    code = "AMP022"
    title = "half-precision weights under autocast"
    sees = Event

    def check(self, event: Event) -> Iterator[Alarm]:
        fix = "Leave the weights in fp32: autocast casts them where that is safe."
        if isinstance(event, HalfWeights):
            yield self.alarm(
                event,
                NOTE,
                f"{event.half} of {event.weights} weights that {event.module} trains are {event.dtype} under "
                "autocast",
                fix,
                "updates below the spacing of the type are rounded away; nothing keeps fp32 master weights",
            )
        elif isinstance(event, ScalerRefused) and "FP16 gradients" in event.error:
            yield self.alarm(
                event,
                NOTE,
                f"scaler.{event.method} raised because {event.half_weights} of {event.weights} weights "
                "are fp16, "
                "and so are their gradients",
                f"{fix} Switching the scaler off removes the message, not the cause.",
                event.error,
            )
