"""AMP027: layers that lose more than their share of precision."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, LayerError
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import WARNING, Alarm
from tilefit.units import share

#: A layer's own error counts from this multiple of the tolerance on.
FLAGGED = 4.0


class LayerLosesPrecision(PrecisionRule):
    """One layer loses far more precision than its element type explains.

    What it sees: `tilefit.precision.compare` runs a batch once as the training does and once in fp32, with
    the same upstream gradients, and measures each module's error: end to end, and on its own, fed with the
    half-precision input. The tolerance is the error that perturbing the input by the element type's epsilon
    makes in fp32; four times that is reported.

    Why nobody notices: The loss still falls; the layers around it make up for it in part.

    Wrong:

        p = torch.softmax(x, -1)       # in half precision
        loss = (y * p.log()).sum()

    Right:

        loss = torch.nn.functional.cross_entropy(x.float(), y)

    Source: TTrace: tolerances per tensor from perturbation by the machine epsilon.
    """

    code = "AMP027"
    title = "a layer loses more precision than its type explains"
    sees = LayerError
    by_module = True

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, LayerError)
        if event.local > FLAGGED * event.tolerance:
            yield self.alarm(
                event,
                WARNING,
                f"the {event.what} of {event.module} is off by {share(event.local)} on its own",
                "Compute this module in fp32, or look for a cancellation or a sum by hand inside it.",
                f"perturbing its input by the type's epsilon explains {share(event.tolerance)}",
                f"with what came before it: {share(event.end_to_end)}",
            )
