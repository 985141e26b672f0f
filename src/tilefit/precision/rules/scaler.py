"""The gradient scaler itself: what it is used with, saved with and brought down by."""

from __future__ import annotations

from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.precision.rules.protocol import UpdateMisplaced
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm

#: So many skipped steps at the start are the scale finding its level.
SETTLING = 3


class ScalerWithBf16(PrecisionRule, code="AMP008", needs=("loss scale",)):
    """A gradient scaler is enabled although all autocast is bf16.

    What it sees: The scaler steps an optimizer, and every autocast region with gradients since the last step
    was bf16.

    Why nobody notices: The weights come out bit-identical: the scale is a power of two, and bf16 has fp32's
    range, so nothing can under- or overflow. It costs a pass over all gradients and a wait for the device in
    each step, and makes every mistake of the scale's protocol possible.

    Wrong:

        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
        scaler.scale(loss).backward()

    Right:

        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    Source: PyTorch, "Automatic Mixed Precision package", gradient scaling: it is for fp16's range.
    """

    title = "a gradient scaler with bf16"
    fix = "Switch it off: GradScaler(enabled=dtype == torch.float16), or remove it."

    def judge(self) -> Alarm:
        message = "the loss is scaled although autocast uses bf16, which needs no scale"
        reach = "bf16 reaches as far as fp32, 3.4e38"
        costs = "the scaler costs a pass over the gradients and a wait for the device in each step"
        return self.alarm(message, f"{reach}; {costs}")


class ScalerNotRestored(PrecisionRule, code="AMP020", needs=("loss scale",)):
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

    title = "the scaler is missing from a checkpoint"
    limit = "what a resumed run does otherwise: tilefit.precision.check_resume replays it"
    fix = "Save and load everything a step changes: model, optimizer, scaler, scheduler, averages."

    #: An optimizer's state was ``saved`` or ``loaded``, and that of the scaler that steps it was not; or a
    #: run was ``resumed``, and gave another loss than the run that was saved,
    what: str
    #: so many steps after the checkpoint.
    step: int = 0
    expected: float = 0.0
    got: float = 0.0

    def judge(self) -> Alarm:
        if self.what == "saved":
            message = "the optimizer's state is saved here, the gradient scaler's is not"
            effect = "a resumed scale starts at its initial value, with skipped steps or lost gradients"
            fix = 'Save scaler.state_dict() too: {"scaler": scaler.state_dict(), ...}.'
            return self.alarm(message, effect, fix=fix)
        if self.what == "loaded":
            message = "the optimizer's state was loaded here, the gradient scaler's not before it was used"
            fix = 'Call scaler.load_state_dict(checkpoint["scaler"]) before the first step.'
            return self.alarm(message, fix=fix)
        message = f"the resumed run differs from the saved one, {self.step} steps after the checkpoint"
        losses = f"loss {self.expected:.9g} uninterrupted, {self.got:.9g} resumed"
        return self.alarm(message, losses, severity=ERROR)


class ScheduleAdvancesOnSkip(PrecisionRule, code="AMP021", needs=("loss scale", "schedule"), values=True):
    """The learning-rate schedule advances on steps that the scaler skipped.

    What it sees: A scheduler that steps once per optimizer step stepped after a step that the scaler had
    skipped. Up to three such steps are a note: the scale settles at the start of most runs.

    Why nobody notices: The warmup is shorter by the skipped steps. PyTorch warns only if the very first step
    is skipped, and names another cause.

    Wrong:

        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    Right:

        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()

    Source: PyTorch, `torch.amp.GradScaler.step`: the step is skipped where gradients are inf or NaN.
    """

    title = "the schedule advances on skipped steps"
    fix = "Step the scheduler only if the scale did not shrink: scaler.get_scale() >= the scale before."

    #: So often a scheduler stepped although the scaler had skipped the optimizer's step, of so many steps
    #: that were asked for.
    skipped: int
    steps: int

    def judge(self) -> Alarm:
        message = "the schedule advances although the scaler skipped the optimizer's step"
        severity = NOTE if self.skipped <= SETTLING else WARNING
        return self.alarm(message, f"{self.skipped} of {self.steps} steps so far", severity=severity)


class HalfWeightsUnderAutocast(
    PrecisionRule, code="AMP022", severity=NOTE, needs=("half-precision weights",)
):
    """The weights that are trained are in half precision, and autocast is used on top.

    What it sees: More than half of the weights of two and more dimensions that an optimizer holds are fp16 or
    bf16 while forward passes run under autocast; and the scaler's exception that follows from it. Frozen
    half-precision weights below fp32 adapters are fine.

    Why nobody notices: Where the scaler refuses ("Attempting to unscale FP16 gradients"), the usual answer is
    to switch the scaler off, which removes the message and leaves the small updates to be rounded away. With
    bf16 nothing is said at all.

    Wrong:

        model.half()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)

    Right:

        with torch.autocast("cuda", dtype=torch.float16):   # the weights stay fp32
            loss = model(x)

    Source: PyTorch, "Automatic Mixed Precision package": do not call half() on the model.
    """

    title = "half-precision weights under autocast"
    fix = "Leave the weights in fp32: autocast casts them where that is safe."

    #: Of an optimizer's trainable weights, those in half precision, and in which.
    half: int
    weights: int
    dtype: str = "float16"
    #: The method of the scaler that raised because of them, and what it said.
    method: str = ""
    error: str = ""

    def judge(self) -> Alarm:
        share = f"{self.half} of {self.weights} weights"
        if self.method:
            fix = f"{self.fix} Switching the scaler off removes the message, not the cause."
            why = f"{share} are fp16, and so are their gradients"
            return self.alarm(f"scaler.{self.method} raised because {why}", self.error, fix=fix)
        why = "updates below the spacing of the type are rounded away; nothing keeps fp32 master weights"
        return self.alarm(f"{share} that {self.module} trains are {self.dtype} under autocast", why)


class ScaleCollapse(PrecisionRule, code="AMP029", severity=ERROR, needs=("loss scale",), values=True):
    """Every step is skipped, because the loss itself is not finite at any scale.

    What it sees: Steps skipped in a row, and losses that were not finite before they were scaled; or a scale
    below 1. Skipped steps alone are normal: a scale that starts at 2^24 takes six to settle.

    Why nobody notices: The scaler skips, halves the scale and goes on, without a message, until the scale is
    0. The weights are never touched.

    Wrong:

        loss = f(x)                      # NaN at any scale
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Right:

        assert torch.isfinite(loss)      # while looking for the cause; AMP026 names it

    Source: PyTorch, `torch.amp.GradScaler.update`: the scale is not guaranteed to stay above 1.
    """

    title = "the loss scale collapses"
    fix = "Find where the inf or NaN comes from: the scale is not its cause (see AMP026)."

    scale: float
    #: Steps skipped in a row, and whether the unscaled losses were finite, None where unknown.
    skipped: int
    loss_finite: bool | None

    def judge(self) -> Alarm | None:
        scale, bad = figure(self.scale), self.loss_finite is False
        if not bad and self.scale >= 1:
            return None
        loss = f"{self.skipped} steps in a row were skipped: the loss is not finite before it is scaled"
        message = loss if bad else f"the loss scale has fallen to {scale}: step after step was skipped"
        return self.alarm(message, f"scale {scale}; nothing has been learnt in these steps")


_REASONS = {
    "already been called": "scaler.update() was not called since: it must end every step",
    "after step": "scaler.update() was not called since the last step: it must end every step",
    "prior to update": "scaler.update() was called without a scaler.step() since the last update",
    "No inf checks": "the optimizer had no gradients, or scaler.update() came between unscale_ and step",
}


def refused(source: str, method: str, error: str, half: int, weights: int) -> PrecisionRule | None:
    """What is broken where a method of the scaler raises, of an optimizer some of whose weights are fp16."""
    if "FP16 gradients" in error:
        return HalfWeightsUnderAutocast(source, half=half, weights=weights, method=method, error=error)
    for words, why in _REASONS.items():
        if words in error:
            return UpdateMisplaced(source, kind="raised", raised=f"{method} raised: {why}", error=error)
    return None
