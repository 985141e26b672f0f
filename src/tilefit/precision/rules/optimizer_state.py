"""AMP014: optimizer state in half precision."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, HalfState
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, WARNING, Alarm


class OptimizerStateInHalf(PrecisionRule):
    """The optimizer's own constants and averages are rounded away in half precision.

    What it sees: At the first step, the element types of the state of an optimizer of `torch.optim`, and what
    eps, beta2 and 1 - lr * weight_decay are when rounded to it. Optimizers that quantise their state
    themselves are not judged.

    Why nobody notices: In fp16 an eps of 1e-8 is 0, and 0/0 is NaN as soon as a gradient underflows. In bf16
    0.999 rounds to 1, so Adam's second moment never decays; and 1 - 1e-5 * 0.01 is exactly 1: no weight
    decays.

    Wrong:

        model.half()
        optimizer = torch.optim.Adam(model.parameters())

    Right:

        optimizer = torch.optim.Adam(model.parameters())   # fp32 weights, so fp32 state
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)

    Source: PyTorch, "Automatic Mixed Precision package": model and inputs should not be cast by hand.
    """

    code = "AMP014"
    title = "optimizer state in half precision"
    sees = HalfState

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, HalfState)
        lost = []
        if event.eps and event.eps_rounded == 0:
            lost.append(f"eps {figure(event.eps)} is 0 in {event.dtype}: 0/0 where a gradient is 0")
        if event.beta2 is not None and event.beta2 != 1 and event.beta2_rounded == 1:
            lost.append(f"beta2 {event.beta2:g} is 1 in {event.dtype}: the second moment never decays")
        if event.decay is not None and event.decay != 1 and event.decay_rounded == 1:
            lost.append(f"1 - lr * weight_decay is 1 in {event.dtype}: no weight decays")
        if lost:
            yield self.alarm(
                event,
                ERROR if event.eps and event.eps_rounded == 0 else WARNING,
                f"{event.module} keeps its state in {event.dtype}, where its constants are rounded away",
                "Keep the weights in fp32 and use autocast, or an optimizer with fp32 state.",
                *lost,
            )
