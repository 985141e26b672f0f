"""AMP018: accumulated losses that are not averaged."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Accumulated, Event
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import NOTE, WARNING, Alarm

#: How near a factor must be to 1, 1/k or 1/k² to be taken for it.
NEAR = 0.05


class AccumulationNotAveraged(PrecisionRule):
    """The losses of several micro-batches are added up without dividing by their number, or divided twice.

    What it sees: Several backward passes per step, each from a loss that is a mean, multiplied by 1 (not
    averaged) or 1/k² (divided twice). That is a note, as a sum may be meant;
    `tilefit.precision.check_accumulation` replays the joined batch and makes it certain.

    Why nobody notices: The gradient is k times too large: the learning rate acts as k times, a clipping
    threshold as 1/k. Adam hides it.

    Wrong:

        for batch in micro_batches:
            loss_fn(model(batch)).backward()
        optimizer.step()

    Right:

        for batch in micro_batches:
            (loss_fn(model(batch)) / len(micro_batches)).backward()
        optimizer.step()

    Source: PyTorch, "Automatic Mixed Precision examples", gradient accumulation.
    """

    code = "AMP018"
    title = "accumulated losses are not averaged"
    sees = Accumulated

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, Accumulated)
        k = event.passes
        if event.confirmed is not None:
            wrong = next((f for f in (float(k), 1 / k) if abs(event.confirmed / f - 1) < NEAR), None)
            if wrong is None or k == 1:
                return
            severity, ratio = WARNING, event.confirmed
            proof = f"replayed: the accumulated gradient is {figure(ratio)} times the joined batch's"
        else:
            if abs(event.factor - 1) < NEAR:
                ratio = float(k)
            elif abs(event.factor * k * k - 1) < NEAR:
                ratio = 1 / k
            else:
                return
            severity = NOTE
            proof = f"each loss is a mean, multiplied by {figure(event.factor)}"
        yield self.alarm(
            event,
            severity,
            f"{k} backward passes feed one step, and their losses are "
            + ("not divided by their number" if ratio > 1 else "divided by their number twice"),
            f"Divide each loss by {k}, once.",
            proof,
            f"the learning rate acts as {figure(ratio)} times, a clipping threshold as "
            f"{figure(1 / ratio)} times",
        )
