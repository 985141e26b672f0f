"""The protocol of the loss scale: what may happen to scaled gradients, and in which order."""

from __future__ import annotations

from math import isinf
from typing import Any

from tilefit.precision.rules.base import PrecisionRule, figure, inverse
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm

_SCALE = ("loss scale",)


class ClipOnScaled(PrecisionRule, code="AMP001", severity=ERROR, needs=_SCALE):
    """Gradients are clipped while they still carry the loss scale.

    What it sees: `clip_grad_norm_` or clipping to a norm by hand between the scaled backward pass and
    `unscale_`, in hooks as well; `clip_grad_value_` is AMP002's. The scale of every gradient is followed
    exactly; no threshold is involved. A limit of inf, used to log the norm, changes nothing and is a note:
    the logged norm is too large by the scale. A constant that the loss was multiplied by counts as a scale
    once it is divided out.

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

    title = "gradients are clipped before they are unscaled"
    fix = "Call scaler.unscale_(optimizer) after backward() and before clipping."

    #: The threshold, or None where the user clips with code of their own.
    threshold: float | None
    #: What the gradients were multiplied by.
    scale: float
    #: The factor is known to come from the gradients themselves.
    certain: bool = True

    def judge(self) -> Alarm:
        scale, limit = figure(self.scale), self.threshold
        if limit is None:
            made = f"a factor made from their own norm while they carry the loss scale of {scale}"
            return self.alarm(f"gradients are scaled by {made}", severity=ERROR if self.certain else WARNING)
        if isinf(limit):
            times = f"is {scale} times the gradients' own: they still carry the loss scale"
            return self.alarm(f"the norm that is computed here {times}", severity=NOTE)
        message = f"clipped at {figure(limit)} while the gradients carry a loss scale of {scale}"
        effect = f"effective limit {figure(limit)} / {scale} = {figure(limit / self.scale)}"
        return self.alarm(message, effect)


class PenaltyOnScaled(PrecisionRule, code="AMP002", severity=ERROR, needs=_SCALE, closely=True):
    """Something is added to, clamped in or put in place of gradients that still carry the loss scale.

    What it sees: Between the scaled backward pass and `unscale_`, an operation that writes to a gradient and
    does not commute with the scale: a penalty, noise, `clamp_` (that of `clip_grad_value_` too),
    `nan_to_num_`, a gradient replaced by a function of itself. What commutes is fine: averaging over ranks,
    multiplying by a number or a mask, clearing, dividing by the scale by hand. Hooks on gradients are looked
    at too, and a loss that `scaler.scale` is given and that is made of gradients which carry the scale: a
    gradient penalty.

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

    title = "scaled gradients are changed"
    fix = "Call scaler.unscale_(optimizer) first, or put the term into the loss."

    #: What does not commute with the scale and wrote to so many gradients that carry one; of 0: made a loss.
    operation: str
    scale: float
    parameters: int

    def judge(self) -> Alarm:
        if not self.parameters:
            message = f"the loss is made of gradients that carry a loss scale of {figure(self.scale)}"
            fix = "Divide them by scaler.get_scale() before anything is made of them."
            return self.alarm(message, "the scale does not commute with what is made of them", fix=fix)
        by = f"by {self.operation}" if self.operation else "by hand"
        which = f"{self.parameters} gradients are changed {by} while they carry"
        which = f"1 gradient is changed {by} while it carries" if self.parameters == 1 else which
        acts = f"what is added here acts as {inverse(self.scale)} of itself"
        hidden = "an inf or NaN removed here is hidden from the scaler"
        return self.alarm(f"{which} a loss scale of {figure(self.scale)}", f"{acts}; {hidden}")


class StepWithoutUnscale(PrecisionRule, code="AMP003", severity=ERROR, needs=_SCALE):
    """The optimizer steps on gradients that still carry the loss scale.

    What it sees: `optimizer.step()` itself is called while the gradients' scale has not been divided out, or
    they are added by hand to weights, or to copies of weights that are copied back; a step through the scaler
    on gradients that came about after `unscale_`.

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

    title = "the optimizer steps on scaled gradients"
    fix = "Call scaler.step(optimizer) instead of optimizer.step()."

    scale: float
    #: The optimizer's, of its first group; None where it has none.
    lr: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    #: It divides by the gradients' own size, as Adam does.
    adaptive: bool = False
    #: The user's own code adds them to the weights.
    by_hand: bool = False
    #: It steps through the scaler, which took them for divided.
    scaler: bool = False

    def judge(self) -> Alarm:
        scale, s, effects = self.scale, figure(self.scale), []
        if self.adaptive and self.eps:
            effects.append(f"eps acts as eps / S = {figure(self.eps)} / {s} = {figure(self.eps / scale)}")
        if not self.adaptive and self.lr is not None:
            effects.append(f"the learning rate acts as lr * S = {figure(self.lr)} * {s}")
        if decay := self.weight_decay:
            acts = f"{figure(decay)} / {s} = {figure(decay / scale)} of what it is beside"
            effects.append(f"a weight decay through the gradient acts as {acts}")
        message = f"{self.module} steps on gradients that carry a loss scale of {s}"
        fix = "Divide the gradients by the scale first, and check them for inf." if self.by_hand else ""
        fix = (
            "Call scaler.unscale_(optimizer) once, after the step's last backward()." if self.scaler else fix
        )
        return self.alarm(message, *effects, "the check for inf and NaN is left out", fix=fix)


class DoubleStep(PrecisionRule, code="AMP004", severity=ERROR):
    """The optimizer steps again on gradients that it has used already.

    What it sees: An optimizer step although no backward pass, and nothing else, has written to any gradient
    of the optimizer since its last step. A second backward pass between two steps, as in SAM, is fine. A
    warning where new gradients stand beside used ones that nobody has cleared.

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

    title = "the optimizer steps twice on the same gradients"
    fix = "Remove one of the two steps: scaler.step(optimizer) calls optimizer.step() itself."

    #: The scaler had skipped the step before because of inf or NaN.
    skipped: bool
    #: The second step went through the scaler, which divides by the scale once more.
    scaler: bool
    #: Beside them are gradients that are new.
    partly: bool = False

    def judge(self) -> Alarm:
        skipped = "the scaler had skipped the step because of inf or NaN in them"
        effects = [skipped if self.skipped else "no gradient has changed since its last step"]
        if self.scaler:
            effects.append("they are divided by the loss scale a second time")
        if self.partly:
            message = f"{self.module} steps on new gradients and on some that it has used already"
            effects[0] = "the used ones have not changed since its last step"
            fix = "Clear all of the optimizer's gradients in each iteration: optimizer.zero_grad()."
            return self.alarm(message, *effects, severity=WARNING, fix=fix)
        return self.alarm(f"{self.module} steps again on gradients it has used already", *effects)


class WrongDivision(PrecisionRule):
    """Gradients were divided by a scale that is not the one they carry."""

    #: ``again`` (they had been divided before), ``older`` (they carry the scale before an update), ``mixed``
    #: (parts with and without a scale), ``spread`` (parts of different scales), ``foreign`` (they carry
    #: another scaler's), ``plain`` (they carry none);
    #: ``loss``: before that, one backward pass starts from a sum of which a part was scaled; ``raised``: a
    #: method of the scaler did.
    kind: str
    #: What they are divided by.
    scale: float = 1.0
    #: The scale they carry, where it is one and known.
    carried: float | None = None
    #: The optimizer that stepped between the backward pass and this division, if one did.
    other: str = ""
    #: How many gradients.
    parameters: int = 0
    #: It was the user's own code that divided.
    by_hand: bool = False

    def older(self, *arithmetic: str) -> Alarm:
        """Gradients of an earlier scale are divided by a later one."""
        carried = "an earlier one" if self.carried is None else figure(self.carried)
        before = f"carry the loss scale from before the last update ({carried})"
        now = f"are divided by the present one ({figure(self.scale)})"
        message = f"the gradients of {self.module} {before} and {now}"
        return self.alarm(message, *arithmetic, severity=WARNING if self.carried == self.scale else ERROR)


class UpdateMisplaced(WrongDivision, code="AMP005", severity=ERROR, needs=_SCALE):
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

    title = "scaler.update() is in the wrong place"
    fix = "Call scaler.update() once per step, after the last scaler.step()."

    #: Of ``raised``: the method of the scaler and why, and what it said.
    raised: str = ""
    error: str = ""

    def judge(self) -> Alarm:
        if self.kind == "raised":
            return self.alarm(f"scaler.{self.raised}", self.error)
        if self.kind == "older":
            return self.older()
        forgot = "an update() between unscale_ and step made the scaler forget the first division"
        reason = "unscale_ had divided them already" if self.by_hand else forgot
        message = f"the gradients of {self.module} are divided by the loss scale a second time"
        return self.alarm(message, f"they become {inverse(self.scale)} of their size: {reason}")


class MixedAccumulation(WrongDivision, code="AMP006", severity=ERROR, needs=_SCALE):
    """A gradient is the sum of parts that carry different scales.

    What it sees: The gradients that one `unscale_` or step consumes come from backward passes with and
    without a scale, or with scales of different generations, or carry none, as they were never scaled or your
    own code has divided them; or a loss is the sum of a scaled and an unscaled part. Gradients are judged
    when they are used: what is cleared before does not count, however it is cleared. Of a backward pass that
    is given gradients, as those of pipeline stages are, nothing is concluded.

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

    title = "scaled and unscaled gradients are mixed"
    limit = "a penalty that is differentiated from a scaled loss and not divided by the scale"
    fix = "Add the losses first and scale the sum: scaler.scale(loss1 + loss2)."

    def judge(self) -> Alarm:
        smaller = f"part counts {inverse(self.scale)} of itself"
        if self.kind == "loss":
            return self.alarm("the loss is a sum of which only a part is scaled", f"the other {smaller}")
        what, fix = _MIXTURES[self.kind]
        small = [] if self.kind in ("spread", "foreign") else [f"that {smaller}"]
        return self.alarm(f"{self.parameters} gradients of {self.module} are {what}", *small, fix=fix)


#: What is wrong with gradients of several parts, and what to do.
_MIXTURES = {
    "mixed": (
        "sums of a scaled part and an unscaled one",
        "Scale every loss whose gradients add up, and unscale once, after the last backward().",
    ),
    "spread": (
        "sums of parts with different loss scales",
        "Call scaler.update() only after the step that uses the accumulated gradients.",
    ),
    "foreign": (
        "multiplied by the loss scale of one scaler and divided by that of another",
        "Step each optimizer through the scaler that scaled its loss.",
    ),
    "plain": (
        "divided by the loss scale, which they do not carry",
        "Call scaler.scale(loss).backward() for every loss this optimizer learns from; do not divide by the "
        "scale yourself, as the scaler does.",
    ),
}


class OneScalerManyOptimizers(WrongDivision, code="AMP019", needs=_SCALE):
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

    title = "one scaler is updated between two optimizers"
    fix = "Call scaler.update() once, after the last optimizer's step."

    def judge(self) -> Alarm:
        return self.older(f"{self.other} stepped, and the scaler was updated, in between")


#: What breaks each way to misuse gradients; ``older`` with another optimizer's step in between, the last; of
#: another scaler, ``foreign``.
_MISUSES: dict[str, type[PrecisionRule]] = {
    **dict.fromkeys(("clipped", "hand"), ClipOnScaled),
    **dict.fromkeys(("again", "older"), UpdateMisplaced),
    **dict.fromkeys(("loss", *_MIXTURES), MixedAccumulation),
    "stepped": StepWithoutUnscale,
    "repeated": DoubleStep,
}


def misuse(kind: str, **figures: Any) -> PrecisionRule:
    """What a misuse of gradients breaks, told with those of the figures that it is about."""
    if kind == "older" and figures.get("foreign"):
        kind = "foreign"
    apart = kind == "older" and figures.get("other")
    rule = OneScalerManyOptimizers if apart else _MISUSES[kind]
    fields = rule.__dataclass_fields__
    return rule(**{name: value for name, value in (figures | {"kind": kind}).items() if name in fields})
