"""The protocol of the loss scale: what may happen to scaled gradients, and in which order."""

from __future__ import annotations

from math import isinf
from typing import Any

from tilefit.precision import events
from tilefit.precision.rules.base import PrecisionRule, figure, inverse
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm


class ClipOnScaled(PrecisionRule[events.GradientsClipped]):
    """Gradients are clipped while they still carry the loss scale.

    What it sees: `clip_grad_norm_`, `clip_grad_value_` or clipping by hand between the scaled backward pass
    and `unscale_`, in hooks as well. The scale of every gradient is followed exactly; no threshold is
    involved. A limit of inf, used to log the norm, changes nothing and is a note: the logged norm is too
    large by the scale. A constant that the loss was multiplied by counts as a scale once it is divided
    out.

    Why nobody notices: With a scale of 65536 a limit of 1.0 acts as 1.5e-5. Every gradient is clipped, all of
    them to the same small norm; Adam divides that out in part, and a flat loss curve hides the rest.

    Wrong:

        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Right:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, "Automatic Mixed Precision examples", working with unscaled gradients.
    """

    code = "AMP001"
    title = "gradients are clipped before they are unscaled"
    severity = ERROR
    fix = "Call scaler.unscale_(optimizer) after backward() and before clipping."
    needs = ("loss scale",)

    def check(self, event: events.GradientsClipped) -> Alarm | None:
        scale, limit = figure(event.scale), event.limit
        if limit is None:
            made = f"a factor made from their own norm while they carry the loss scale of {scale}"
            severity = ERROR if event.certain else WARNING
            return self.alarm(event, f"gradients are scaled by {made}", severity=severity)
        if isinf(limit):
            times = f"is {scale} times the gradients' own: they still carry the loss scale"
            return self.alarm(event, f"the norm that is computed here {times}", severity=NOTE)
        message = f"clipped at {figure(limit)} while the gradients carry a loss scale of {scale}"
        effect = f"effective limit {figure(limit)} / {scale} = {figure(limit / event.scale)}"
        return self.alarm(event, message, effect)


class PenaltyOnScaled(PrecisionRule[events.GradientsWritten]):
    """Something is added to, clamped in or put in place of gradients that still carry the loss scale.

    What it sees: Between the scaled backward pass and `unscale_`, an operation that writes to a gradient and
    does not commute with the scale: a penalty, noise, `clamp_`, `nan_to_num_`, a gradient replaced by a
    function of itself. What commutes is fine: averaging over ranks, multiplying by a number or a mask,
    clearing, dividing by the scale by hand. Hooks on gradients are looked at too.

    Why nobody notices: The optimizer divides what was added by the scale: with 65536, a weight decay of 1e-3
    acts as 1.5e-8. And `nan_to_num_` hides from the scaler the inf it must see to skip the step.

    Wrong:

        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad.add_(p.sign(), alpha=1e-3)
        scaler.step(optimizer)

    Right:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.add_(p.sign(), alpha=1e-3)
        scaler.step(optimizer)

    Source: PyTorch, "Automatic Mixed Precision examples", gradient penalty.
    """

    code = "AMP002"
    title = "scaled gradients are changed"
    severity = ERROR
    fix = "Call scaler.unscale_(optimizer) first, or put the term into the loss."
    needs = ("loss scale",)
    closely = True

    def check(self, event: events.GradientsWritten) -> Alarm | None:
        by = f"by {event.operation}" if event.operation else "by hand"
        scale = figure(event.scale)
        changed = (
            f"1 gradient is changed {by} while it carries"
            if event.parameters == 1
            else f"{event.parameters} gradients are changed {by} while they carry"
        )
        return self.alarm(
            event,
            f"{changed} a loss scale of {scale}",
            f"what is added here acts as {inverse(event.scale)} of itself; an inf or NaN removed here is "
            "hidden from the scaler",
        )


class StepWithoutUnscale(PrecisionRule[events.ScaledStep]):
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
    severity = ERROR
    fix = "Call scaler.step(optimizer) instead of optimizer.step()."
    needs = ("loss scale",)

    def check(self, event: events.ScaledStep) -> Alarm | None:
        scale, eps, lr, decay = event.scale, event.eps, event.lr, event.weight_decay
        s = figure(scale)
        effects = []
        if event.adaptive and eps:
            effects.append(f"eps acts as eps / S = {figure(eps)} / {s} = {figure(eps / scale)}")
        if not event.adaptive and lr is not None:
            effects.append(f"the learning rate acts as lr * S = {figure(lr)} * {s}")
        if decay:
            acts = f"{figure(decay)} / {s} = {figure(decay / scale)} of what it is beside"
            effects.append(f"a weight decay through the gradient acts as {acts}")
        message = f"{event.module} steps on gradients that carry a loss scale of {s}"
        return self.alarm(event, message, *effects, "the check for inf and NaN is left out")


class DoubleStep(PrecisionRule[events.RepeatedStep]):
    """The optimizer steps again on gradients that it has used already.

    What it sees: An optimizer step although no backward pass, and nothing else, has written to any gradient
    of the optimizer since its last step. A second backward pass between two steps, as in SAM, is fine.

    Why nobody notices: The weights move twice as far, in the right direction. And where the scaler has
    skipped the step because of inf, the second one applies the inf.

    Wrong:

        scaler.step(optimizer)
        scaler.update()
        optimizer.step()

    Right:

        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, `torch.amp.GradScaler.step`: it calls `optimizer.step()` itself.
    """

    code = "AMP004"
    title = "the optimizer steps twice on the same gradients"
    severity = ERROR
    fix = "Remove one of the two steps: scaler.step(optimizer) calls optimizer.step() itself."

    def check(self, event: events.RepeatedStep) -> Alarm | None:
        skipped = "the scaler had skipped the step because of inf or NaN in them"
        effects = [skipped if event.skipped else "no gradient has changed since its last step"]
        if event.scaler:
            effects.append("they are divided by the loss scale a second time")
        return self.alarm(event, f"{event.module} steps again on gradients it has used already", *effects)


_REASONS = {
    "already been called": "scaler.update() was not called since: it must end every step",
    "after step": "scaler.update() was not called since the last step: it must end every step",
    "prior to update": "scaler.update() was called without a scaler.step() since the last update",
    "No inf checks": "the optimizer had no gradients, or scaler.update() came between unscale_ and step",
}


class UpdateMisplaced(PrecisionRule[events.ScalerRefused | events.WrongDivision]):
    """`scaler.update()` comes too early, too often or not at all.

    What it sees: Gradients that are divided by the scale a second time because an `update()` between
    `unscale_` and `step` made the scaler forget that it had divided them; gradients that carry the scale from
    before an update; and the scaler's own exceptions, with what led to them.

    Why nobody notices: Dividing twice makes the gradient 65536 times too small, without a word. Adam's answer
    to that is nearly the same step.

    Wrong:

        scaler.unscale_(optimizer)
        scaler.update()
        scaler.step(optimizer)

    Right:

        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, `torch.amp.GradScaler.update`: to be called once, at the end of the iteration.
    """

    code = "AMP005"
    title = "scaler.update() is in the wrong place"
    severity = ERROR
    fix = "Call scaler.update() once per step, after the last scaler.step()."
    needs = ("loss scale",)

    def check(self, event: events.ScalerRefused | events.WrongDivision) -> Alarm | None:
        if isinstance(event, events.ScalerRefused):
            reason = next((why for words, why in _REASONS.items() if words in event.error), "")
            message = f"scaler.{event.method} raised: {reason}"
            return self.alarm(event, message, event.error) if reason else None
        if event.kind == "older" and not event.other:
            return _older(self, event)
        if event.kind != "again":
            return None
        forgot = "an update() between unscale_ and step made the scaler forget the first division"
        reason = "unscale_ had divided them already" if event.by_hand else forgot
        message = f"the gradients of {event.module} are divided by the loss scale a second time"
        return self.alarm(event, message, f"they become {inverse(event.scale)} of their size: {reason}")


def _older(rule: PrecisionRule[Any], event: events.WrongDivision, *arithmetic: str) -> Alarm:
    """Gradients of an earlier scale are divided by a later one."""
    carried = "an earlier one" if event.carried is None else figure(event.carried)
    before = f"carry the loss scale from before the last update ({carried})"
    now = f"are divided by the present one ({figure(event.scale)})"
    severity = WARNING if event.carried == event.scale else ERROR
    message = f"the gradients of {event.module} {before} and {now}"
    return rule.alarm(event, message, *arithmetic, severity=severity)


class MixedAccumulation(PrecisionRule[events.MixedLoss | events.WrongDivision]):
    """A gradient is the sum of parts that carry different scales.

    What it sees: The gradients that one `unscale_` or step consumes come from backward passes with and
    without a scale, or with scales of different generations; or a loss is the sum of a scaled and an
    unscaled part. Gradients are judged when they are used: what is cleared before does not count, however
    it is cleared. Of a backward pass that is given gradients, as those of pipeline stages are, nothing is
    concluded.

    Why nobody notices: One part is too small by the scale, so it is as if it were not there. With
    accumulation that leaves the last micro-batch; with an auxiliary loss it leaves the main one.

    Wrong:

        for batch in micro_batches:
            scaler.scale(loss(batch) / k).backward()
            scaler.unscale_(optimizer)
            scaler.update()
        scaler.step(optimizer)

    Right:

        for batch in micro_batches:
            scaler.scale(loss(batch) / k).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    Source: PyTorch, "Automatic Mixed Precision examples", gradient accumulation: the scale must stay the same
    while gradients accumulate.
    """

    code = "AMP006"
    title = "scaled and unscaled gradients are mixed"
    severity = ERROR
    fix = "Add the losses first and scale the sum: scaler.scale(loss1 + loss2)."
    needs = ("loss scale",)
    limit = "a penalty that is differentiated from a scaled loss and not divided by the scale"

    def check(self, event: events.MixedLoss | events.WrongDivision) -> Alarm | None:
        smaller = f"part counts {inverse(event.scale)} of itself"
        if isinstance(event, events.MixedLoss):
            message = "the loss is a sum of which only a part is scaled"
            return self.alarm(event, message, f"the other {smaller}")
        if event.kind not in _MIXTURES:
            return None
        what, fix, small = _MIXTURES[event.kind]
        message = f"{event.parameters} gradients of {event.module} are {what}"
        return self.alarm(event, message, *([f"that {smaller}"] if small else []), fix=fix)


#: What is wrong with gradients of several parts, what to do, and whether a part is too small.
_MIXTURES = {
    "mixed": (
        "sums of a scaled part and an unscaled one",
        "Scale every loss whose gradients add up, and unscale once, after the last backward().",
        True,
    ),
    "spread": (
        "sums of parts with different loss scales",
        "Call scaler.update() only after the step that uses the accumulated gradients.",
        False,
    ),
    "plain": (
        "divided by the loss scale and were never multiplied by it",
        "Call scaler.scale(loss).backward() for every loss this optimizer learns from.",
        True,
    ),
}


class OneScalerManyOptimizers(PrecisionRule[events.WrongDivision]):
    """The scaler is updated between the steps of two optimizers that learn from the same backward pass.

    What it sees: The gradients of an optimizer carry the scale from before an update, and another optimizer
    stepped in between. It is an error where the scale has changed, else a warning: it will.

    Why nobody notices: Most updates leave the scale as it is. Every 2000 steps, and at each overflow, the
    second optimizer's gradients are divided by twice or half of what they carry.

    Wrong:

        scaler.step(optimizer1); scaler.update()
        scaler.step(optimizer2); scaler.update()

    Right:

        scaler.step(optimizer1)
        scaler.step(optimizer2)
        scaler.update()

    Source: PyTorch, "Automatic Mixed Precision examples", working with multiple models, losses, and
    optimizers.
    """

    code = "AMP019"
    title = "one scaler is updated between two optimizers"
    fix = "Call scaler.update() once, after the last optimizer's step."
    needs = ("loss scale",)

    def check(self, event: events.WrongDivision) -> Alarm | None:
        if event.kind != "older" or not event.other:
            return None
        return _older(self, event, f"{event.other} stepped, and the scaler was updated, in between")
