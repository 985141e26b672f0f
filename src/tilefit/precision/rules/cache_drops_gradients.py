"""AMP010: weights that lose their gradient."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, GradientLost
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import ERROR, Alarm


class CacheDropsGradients(PrecisionRule):
    """A forward pass without gradients makes a later one in the same autocast region lose them.

    What it sees: A weight took part in a forward pass with gradients, the module's output received a
    gradient, the weight received none, and the module had run without gradients before in the same region.

    Why nobody notices: The copy of the weight that autocast made under `no_grad` has no history, and older
    versions of PyTorch used it again. The layer's input still gets a gradient, so everything before it
    learns.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                teacher = model(x)
            loss = criterion(model(x), teacher)

    Right:

        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            teacher = model(x)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), teacher)

    Source: PyTorch pull request 165068, which mended it at the end of 2025.
    """

    code = "AMP010"
    title = "weights lose their gradient to autocast's cache"
    sees = GradientLost
    by_module = True

    def check(self, event: Event) -> Iterator[Alarm]:
        yield self.alarm(
            event,
            ERROR,
            f"{event.module} gets no gradient although its output does: a forward pass without gradients "
            "came "
            "first in this autocast region",
            "Give the forward pass without gradients a region of its own, or pass cache_enabled=False.",
        )
