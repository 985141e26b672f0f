"""AMP013: updates lost to rounding."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, Movement
from tilefit.precision.rules.base import SIGNIFICAND_BITS, PrecisionRule, figure
from tilefit.rules.finding import WARNING, Alarm
from tilefit.units import share

#: Below this share of the intended movement, updates count as lost.
LOST = 0.5


class UpdateBelowUlp(PrecisionRule):
    """Weights in half precision do not move, because each update is too small to change them.

    What it sees: Over 32 steps, up to 1024 values of each half-precision parameter are followed by the same
    optimizer in fp32, with the same gradients. The projection of the actual movement on that is about 1 where
    all is well, also with stochastic rounding, Kahan summation or fp32 master weights, and about 0 where the
    updates are lost. It is never looked at for fp32 parameters.

    Why nobody notices: A bf16 weight keeps 8 bits, so hardly any answers an update below |w|/512. The loss
    falls a little, as the small weights learn, then stalls.

    Wrong:

        model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    Right:

        with torch.autocast("cuda", dtype=torch.bfloat16):   # the weights stay fp32
            loss = model(x)

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020).
    """

    code = "AMP013"
    title = "updates are lost to rounding"
    sees = Movement

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, Movement)
        if event.parameter and event.projection < LOST:
            bits = SIGNIFICAND_BITS[event.dtype] + 1
            yield self.alarm(
                event,
                WARNING,
                f"{event.dtype} weights make {share(max(0.0, event.projection))} of the movement the "
                "optimizer "
                f"intends, over {event.steps} steps",
                "Keep the weights in fp32 and use autocast, or an optimizer with fp32 master weights, "
                "stochastic "
                "rounding or Kahan summation.",
                f"an update below |w| / 2^{bits} = |w| / {2**bits} does not change a {event.dtype} weight",
                f"projection on the same optimizer in fp32: {figure(event.projection)}, on {event.values} "
                "values",
            )
