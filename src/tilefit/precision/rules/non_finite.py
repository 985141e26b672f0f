"""AMP026: where inf and NaN come from."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, NonFinite
from tilefit.precision.rules.base import LARGEST, PrecisionRule, figure
from tilefit.rules.finding import ERROR, Alarm


class NonFiniteOrigin(PrecisionRule):
    """The first operation that makes inf or NaN out of finite numbers.

    What it sees: After a loss that is not finite, or after three steps in a row that the scaler skipped with
    losses that are not finite, one step is run with every operation checked, and the first whose inputs are
    finite and whose output is not is named, forward or backward. Overflow of scaled gradients that the scaler
    answers by halving the scale is normal and never reported. `watch(..., find_non_finite=True)` checks every
    step, for those whose first inf ends up in the weights.

    Why nobody notices: What raises the alarm is the loss, or a layer far behind the one that overflowed.

    Wrong:

        h = big(x)      # crosses 65504 in fp16 at some step
        loss = f(h)     # here the NaN is seen

    Right:

        with torch.autocast("cuda", enabled=False):
            h = big(x.float())

    Source: IEEE 754: fp16 ends at 65504.
    """

    code = "AMP026"
    title = "where inf or NaN comes from"
    sees = NonFinite

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, NonFinite)
        if event.operation == "weights":
            yield self.alarm(
                event,
                ERROR,
                "the weights hold inf or NaN already: an earlier step brought them there",
                "Start again with watch(..., find_non_finite=True), or --find-non-finite.",
            )
            return
        limit = LARGEST.get(event.dtype)
        yield self.alarm(
            event,
            ERROR,
            f"{event.operation} makes inf or NaN out of finite inputs, {event.phase}, in {event.dtype}",
            "Compute this operation in fp32, or bound its input.",
            *((f"{event.dtype} ends at {figure(limit)}",) if limit else ()),
        )
