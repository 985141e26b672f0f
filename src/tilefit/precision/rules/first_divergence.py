"""AMP028: where two equal runs part."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Diverged, Event
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import NOTE, WARNING, Alarm


class FirstDivergence(PrecisionRule):
    """Two replays of the same step, with the same random numbers, differ.

    What it sees: `tilefit.precision.first_divergence` runs a step twice from the same state and compares a
    hash of every module's output, and of the gradients: the first that differs is named. It is a note while
    deterministic algorithms are not asked for, since atomics and autotuning may then differ.

    Why nobody notices: Two runs with one seed part at some step, and nothing says where.

    Wrong:

        torch.manual_seed(0)     # and a layer that uses atomic additions

    Right:

        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)

    Source: PyTorch, "Reproducibility".
    """

    code = "AMP028"
    title = "two equal runs part here"
    sees = Diverged

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, Diverged)
        yield self.alarm(
            event,
            WARNING if event.deterministic else NOTE,
            f"two replays of the same step differ, first in {event.module}",
            "torch.use_deterministic_algorithms(True), and no state outside of torch's generators.",
            f"{event.calls} module calls before it agree bit for bit",
        )
