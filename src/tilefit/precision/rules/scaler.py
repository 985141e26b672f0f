"""The gradient scaler itself: what it is used with, saved with and brought down by."""

from __future__ import annotations

from tilefit.precision import events
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm


class ScalerWithBf16(PrecisionRule[events.ScalerUsed]):
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

    code = "AMP008"
    title = "a gradient scaler with bf16"
    fix = "Switch it off: GradScaler(enabled=dtype == torch.float16), or remove it."
    needs = ("loss scale",)

    def check(self, event: events.ScalerUsed) -> Alarm | None:
        if event.dtypes != {"bfloat16"}:
            return None
        return self.alarm(
            event,
            "the loss is scaled although autocast uses bf16, which needs no scale",
            "bf16 reaches as far as fp32, 3.4e38; the scaler costs a pass over the gradients and a wait for "
            "the device in each step",
        )


class ScalerNotRestored(PrecisionRule[events.ScalerNotSaved | events.ScalerNotLoaded | events.ResumeDiffers]):
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
    fix = "Save and load everything a step changes: model, optimizer, scaler, scheduler, averages."
    needs = ("loss scale",)
    limit = "what a resumed run does otherwise: tilefit.precision.check_resume replays it"

    def check(
        self, event: events.ScalerNotSaved | events.ScalerNotLoaded | events.ResumeDiffers
    ) -> Alarm | None:
        if isinstance(event, events.ScalerNotSaved):
            message = "the optimizer's state is saved here, the gradient scaler's is not"
            effect = "the scale starts at its initial value, with skipped steps or lost gradients"
            fix = 'Save scaler.state_dict() too: {"scaler": scaler.state_dict(), ...}.'
            return self.alarm(event, message, f"after a resume {effect}", fix=fix)
        if isinstance(event, events.ScalerNotLoaded):
            message = (
                "the optimizer's state was loaded here, the gradient scaler's was not before it was used"
            )
            fix = 'Call scaler.load_state_dict(checkpoint["scaler"]) before the first step.'
            return self.alarm(event, message, fix=fix)
        message = f"the resumed run differs from the saved one, {event.step} steps after the checkpoint"
        losses = f"loss {event.expected:.9g} uninterrupted, {event.got:.9g} resumed"
        return self.alarm(event, message, losses, severity=ERROR)


#: So many skipped steps at the start are the scale finding its level.
SETTLING = 3


class ScheduleAdvancesOnSkip(PrecisionRule[events.SchedulerStepped]):
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

    code = "AMP021"
    values = True
    title = "the schedule advances on skipped steps"
    fix = "Step the scheduler only if the scale did not shrink: scaler.get_scale() >= the scale before."
    needs = ("loss scale", "schedule")

    def check(self, event: events.SchedulerStepped) -> Alarm | None:
        message = "the schedule advances although the scaler skipped the optimizer's step"
        severity = NOTE if event.skipped <= SETTLING else WARNING
        return self.alarm(event, message, f"{event.skipped} of {event.steps} steps so far", severity=severity)


class HalfWeightsUnderAutocast(PrecisionRule[events.HalfWeights | events.ScalerRefused]):
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

    code = "AMP022"
    title = "half-precision weights under autocast"
    severity = NOTE
    fix = "Leave the weights in fp32: autocast casts them where that is safe."
    needs = ("half-precision weights",)

    def check(self, event: events.HalfWeights | events.ScalerRefused) -> Alarm | None:
        if isinstance(event, events.HalfWeights):
            share = f"{event.half} of {event.weights} weights that {event.module} trains"
            effect = "updates below the spacing of the type are rounded away"
            why = f"{effect}; nothing keeps fp32 master weights"
            return self.alarm(event, f"{share} are {event.dtype} under autocast", why)
        if "FP16 gradients" not in event.error:
            return None
        fp16 = f"{event.half_weights} of {event.weights} weights are fp16, and so are their gradients"
        fix = f"{self.fix} Switching the scaler off removes the message, not the cause."
        return self.alarm(event, f"scaler.{event.method} raised because {fp16}", event.error, fix=fix)


class ScaleCollapse(PrecisionRule[events.ScaleHistory]):
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

    code = "AMP029"
    values = True
    title = "the loss scale collapses"
    severity = ERROR
    fix = "Find where the inf or NaN comes from: the scale is not its cause (see AMP026)."
    needs = ("loss scale",)

    def check(self, event: events.ScaleHistory) -> Alarm | None:
        scale, bad = figure(event.scale), event.loss_finite is False
        if not bad and event.scale >= 1:
            return None
        loss = f"{event.skipped} steps in a row were skipped: the loss is not finite before it is scaled"
        message = loss if bad else f"the loss scale has fallen to {scale}: step after step was skipped"
        return self.alarm(event, message, f"scale {scale}; nothing has been learnt in these steps")
