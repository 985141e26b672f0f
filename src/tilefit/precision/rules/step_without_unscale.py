"""AMP003: an optimizer step on scaled gradients."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, ScaledStep
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, Alarm


class StepWithoutUnscale(PrecisionRule):
    """The optimizer steps on gradients that still carry the loss scale.

    What it sees: `optimizer.step()` itself is called while the gradients' scale has not been divided out.

    Why nobody notices: Adam divides by the gradients' own size, so the scale cancels: losses agree to many
    digits. What does not cancel: eps (65536 times too small in effect), an L2 penalty through the gradient,
    the learning rate of SGD, clipping, and the check for inf, which is left out altogether.

    Wrong:

        scaler.scale(loss).backward()
        optimizer.step()
        scaler.update()

    Right:

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, `torch.amp.GradScaler.step`.
    """

    code = "AMP003"
    title = "the optimizer steps on scaled gradients"
    sees = ScaledStep

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, ScaledStep)
        s = event.scale
        effects = []
        if event.adaptive and event.eps:
            effects.append(
                f"eps acts as eps / S = {figure(event.eps)} / {figure(s)} = {figure(event.eps / s)}"
            )
        if not event.adaptive and event.lr is not None:
            effects.append(f"the learning rate acts as lr * S = {figure(event.lr)} * {figure(s)}")
        if event.weight_decay:
            effects.append(
                f"a weight decay through the gradient acts as {figure(event.weight_decay)} / {figure(s)} = "
                f"{figure(event.weight_decay / s)} of what it is beside"
            )
        yield self.alarm(
            event,
            ERROR,
            f"{event.module} steps on gradients that carry a loss scale of {figure(s)}",
            "Call scaler.step(optimizer) instead of optimizer.step().",
            *effects,
            "the check for inf and NaN is left out",
        )
