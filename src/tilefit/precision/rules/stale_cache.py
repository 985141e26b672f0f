"""AMP009: old copies of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, StaleCache
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import ERROR, Alarm


class StaleWeightCache(PrecisionRule):
    """One autocast region surrounds the whole loop, so every forward pass uses the first weights.

    What it sees: Weights are stepped inside an outermost autocast region with its cache on, and a later
    forward pass of the same region computes gradients for them in half precision. A region per iteration that
    contains the backward pass and the step is harmless.

    Why nobody notices: Autocast keeps the half-precision copy of a weight until the outermost region ends.
    The optimizer changes the weights; the forward pass does not see it. The loss stays the same for the same
    batch, and wanders with the data otherwise.

    Wrong:

        with torch.autocast("cuda", dtype=torch.bfloat16):
            for x in data:
                loss = model(x)
                loss.backward()
                optimizer.step()

    Right:

        for x in data:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
            optimizer.step()

    Source: PyTorch, `torch.autocast`, cache_enabled; regions should hold the forward pass and the loss alone.
    """

    code = "AMP009"
    title = "autocast keeps using old weights"
    sees = StaleCache

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, StaleCache)
        yield self.alarm(
            event,
            ERROR,
            f"this autocast region goes on with the half-precision copies of {event.parameters} weights from "
            "before they were stepped",
            "Enter the region in each iteration, around the forward pass and the loss alone.",
            "stepped inside the region",
        )
