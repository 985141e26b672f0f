"""AMP025: evaluation in another precision."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import EvaluationDtype, Event
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import WARNING, Alarm


class EvalTrainMismatch(PrecisionRule):
    """The model is evaluated in another precision than it is trained in.

    What it sees: The autocast state of the forward passes after `model.eval()`, and of those with gradients.

    Why nobody notices: Metrics are a little lower or less stable than they could be, or better than what will
    be deployed.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            train(model)
        model.eval()
        metric(model(x))

    Right:

        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            metric(model(x))

    Source: PyTorch, "Automatic Mixed Precision examples": inference belongs under autocast as well.
    """

    code = "AMP025"
    title = "evaluation runs in another precision"
    sees = EvaluationDtype
    by_module = True

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, EvaluationDtype)
        if event.training != event.evaluation:
            yield self.alarm(
                event,
                WARNING,
                f"{event.module} is trained in {event.training} and evaluated in {event.evaluation}",
                "Evaluate under the autocast of training, or compare metrics once and mute this rule.",
            )
