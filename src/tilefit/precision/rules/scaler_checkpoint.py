"""AMP020: checkpoints without the scaler."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, ResumeDiffers, ScalerNotLoaded, ScalerNotSaved
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import ERROR, WARNING, Alarm


class ScalerNotRestored(PrecisionRule):
    """A checkpoint holds the optimizer's state and not the scaler's.

    What it sees: `torch.save` or `torch.distributed.checkpoint.save` of something that holds an optimizer's
    state, when a scaler steps it and no scaler's state is saved before the next step; an optimizer that is
    loaded, and a scaler that scales without having been loaded. Exports of weights alone are fine.
    `tilefit.precision.check_resume` compares a resumed run with an uninterrupted one, bit for bit.

    Why nobody notices: After each resume the scale starts at 65536 again: a burst of skipped steps, or lost
    gradients if it had grown.

    Wrong:

        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    Right:

        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict()}, path)

    Source: PyTorch, "Automatic Mixed Precision recipe", saving/resuming.
    """

    code = "AMP020"
    title = "the scaler is missing from a checkpoint"
    sees = Event

    def check(self, event: Event) -> Iterator[Alarm]:
        if isinstance(event, ScalerNotSaved):
            yield self.alarm(
                event,
                WARNING,
                "the optimizer's state is saved here, the gradient scaler's is not",
                'Save scaler.state_dict() too: {"scaler": scaler.state_dict(), ...}.',
                "after a resume the scale starts at its initial value, with skipped steps or lost gradients",
            )
        elif isinstance(event, ScalerNotLoaded):
            yield self.alarm(
                event,
                WARNING,
                "the optimizer's state was loaded here, the gradient scaler's was not before it was used",
                'Call scaler.load_state_dict(checkpoint["scaler"]) before the first step.',
            )
        elif isinstance(event, ResumeDiffers):
            yield self.alarm(
                event,
                ERROR,
                f"the resumed run differs from the saved one, {event.step} steps after the checkpoint",
                "Save and load everything a step changes: model, optimizer, scaler, scheduler, averages.",
                f"loss {event.expected:.9g} uninterrupted, {event.got:.9g} resumed",
            )
