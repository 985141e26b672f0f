"""AMP015: averages and sums that stop moving."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, Movement
from tilefit.precision.rules.base import SIGNIFICAND_BITS, PrecisionRule, figure
from tilefit.precision.rules.update_below_ulp import LOST
from tilefit.rules.finding import WARNING, Alarm
from tilefit.units import share


class HalfAccumulator(PrecisionRule):
    """A running average or sum in half precision no longer changes.

    What it sees: A half-precision tensor that is no parameter and that several steps change in place with
    `add_`, `mul_` or `lerp_`: on watched steps the change that happened, projected on the change that fp32
    arithmetic makes of the same values.

    Why nobody notices: A moving average with decay 0.9999 changes by 1e-4 of its distance in each step, which
    bf16 rounds to nothing: the averaged model is the initial one. A sum of ones stops at 256 in bf16, at
    2048 in fp16.

    Wrong:

        ema.mul_(0.9999).add_(p.bfloat16(), alpha=1e-4)   # ema is bf16

    Right:

        ema.mul_(0.9999).add_(p, alpha=1e-4)              # ema is fp32

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020), on nearest rounding of small updates.
    """

    code = "AMP015"
    title = "a half-precision average stops moving"
    sees = Movement

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, Movement)
        if not event.parameter and event.projection < LOST:
            bits = SIGNIFICAND_BITS[event.dtype] + 1
            yield self.alarm(
                event,
                WARNING,
                f"a {event.dtype} tensor that is updated in place makes "
                f"{share(max(0.0, event.projection))} of "
                "the change intended",
                "Keep running sums and averages in fp32.",
                f"a change below 1/{2**bits} of a value is rounded away in {event.dtype}",
                f"projection on fp32: {figure(event.projection)}, over {event.steps} updates",
            )
