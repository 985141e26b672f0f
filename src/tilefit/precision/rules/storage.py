"""Values kept in half precision, sums of gradients, and ranks that should agree."""

from __future__ import annotations

from tilefit.precision import events
from tilefit.precision.rules.base import SIGNIFICAND_BITS, PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm
from tilefit.units import share

#: Below this share of the intended movement, updates count as lost.
LOST = 0.5
#: Steps from which on that is certain.
ENOUGH = 30


class UpdateBelowUlp(PrecisionRule[events.Movement]):
    """Weights in half precision do not move, because each update is too small to change them.

    What it sees: Over 32 steps, up to 1024 values of each half-precision parameter are followed by the same
    optimizer in fp32, with the same gradients. The projection of the actual movement on that is about 1 where
    all is well, also with stochastic rounding, Kahan summation or fp32 master weights, and about 0 where the
    updates are lost. In a run of 3 to 29 steps it is a note. It is never looked at for fp32 parameters.

    Why nobody notices: A bf16 weight keeps 8 bits, so hardly any answers an update below |w|/512. The loss
    falls a little, as the small weights learn, then stalls.

    Wrong:

        model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    Right:

        with torch.autocast("cuda", dtype=torch.bfloat16):   # the weights stay fp32
            loss = model(x)

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020).
    """

    code = "AMP013"
    values = True
    title = "updates are lost to rounding"
    fix = (
        "Keep the weights in fp32 and use autocast, or an optimizer with fp32 master weights, stochastic "
        "rounding or Kahan summation."
    )
    needs = ("half-precision weights",)

    def check(self, event: events.Movement) -> Alarm | None:
        if not event.parameter or event.projection >= LOST:
            return None
        dtype, bits, made = event.dtype, SIGNIFICAND_BITS[event.dtype] + 1, share(max(0.0, event.projection))
        projection = f"projection on the same optimizer in fp32: {figure(event.projection)}"
        return self.alarm(
            event,
            f"{dtype} weights make {made} of the movement the optimizer intends, over {event.steps} steps",
            f"an update below |w| / 2^{bits} = |w| / {2**bits} does not change a {dtype} weight",
            f"{projection}, on {event.values} values",
            severity=WARNING if event.steps >= ENOUGH else NOTE,
        )


class OptimizerStateInHalf(PrecisionRule[events.HalfState]):
    """The optimizer's own constants and averages are rounded away in half precision.

    What it sees: At the first step, the element types of the state of an optimizer of `torch.optim`, and what
    eps, beta2 and 1 - lr * weight_decay are when rounded to it; of other optimizers, a multiplication of
    half-precision weights by a number that their type rounds to 1. Optimizers that quantise their state
    themselves are not judged.

    Why nobody notices: In fp16 an eps of 1e-8 is 0, and 0/0 is NaN as soon as a gradient underflows. In bf16
    0.999 rounds to 1, so Adam's second moment never decays; and 1 - 1e-5 * 0.01 is exactly 1: no weight
    decays.

    Wrong:

        model.half()
        optimizer = torch.optim.Adam(model.parameters())

    Right:

        optimizer = torch.optim.Adam(model.parameters())   # fp32 weights, so fp32 state
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)

    Source: PyTorch, "Automatic Mixed Precision package": model and inputs should not be cast by hand.
    """

    code = "AMP014"
    title = "optimizer state in half precision"
    fix = "Keep the weights in fp32 and use autocast, or an optimizer with fp32 state."
    needs = ("half-precision weights",)

    def check(self, event: events.HalfState) -> Alarm | None:
        dtype, lost, severity = event.dtype, [], WARNING
        if event.eps and event.eps_rounded == 0:
            lost.append(f"eps {figure(event.eps)} is 0 in {dtype}: 0/0 where a gradient is 0")
            severity = ERROR
        if event.beta2 not in (None, 1) and event.beta2_rounded == 1:
            lost.append(f"beta2 {event.beta2:g} is 1 in {dtype}: the second moment never decays")
        if event.decay not in (None, 1) and event.decay_rounded == 1:
            lost.append(f"1 - lr * weight_decay is 1 in {dtype}: no weight decays")
        message = f"{event.module} keeps its state in {dtype}, where its constants are rounded away"
        return self.alarm(event, message, *lost, severity=severity) if lost else None


class HalfAccumulator(PrecisionRule[events.Movement]):
    """A running average or sum in half precision no longer changes.

    What it sees: A half-precision tensor that is no parameter and that several steps change, in place through
    any alias of it, or by a new tensor made of the old one: on watched steps the change that happened,
    projected on the change that fp32 arithmetic makes of the same values. What stalls only later than
    that is not seen.

    Why nobody notices: A moving average with decay 0.9999 changes by 1e-4 of its distance in each step, which
    bf16 rounds to nothing: the averaged model is the initial one. A sum of ones stops at 256 in bf16, at
    2048 in fp16.

    Wrong:

        ema.mul_(0.9999).add_(p.bfloat16(), alpha=1e-4)   # ema is bf16

    Right:

        ema.mul_(0.9999).add_(p, alpha=1e-4)              # ema is fp32

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020), on nearest rounding of small updates.
    """

    code = "AMP015"
    values = True
    title = "a half-precision average stops moving"
    fix = "Keep running sums and averages in fp32."
    closely = True
    limit = "a sum that stalls only later than the steps watched"

    def check(self, event: events.Movement) -> Alarm | None:
        if event.parameter or event.projection >= LOST:
            return None
        dtype, made = event.dtype, share(max(0.0, event.projection))
        return self.alarm(
            event,
            f"a {dtype} tensor that is updated in place makes {made} of the change intended",
            f"a change below 1/{2 ** (SIGNIFICAND_BITS[dtype] + 1)} of a value is rounded away in {dtype}",
            f"projection on fp32: {figure(event.projection)}, over {event.steps} updates",
        )


#: How near a factor must be to 1, 1/k or 1/k² to be taken for it.
NEAR = 0.05


class AccumulationNotAveraged(PrecisionRule[events.Accumulated]):
    """The losses of several micro-batches are added up without dividing by their number, or divided twice.

    What it sees: Several backward passes per step, each from a loss that is a mean, multiplied by 1 (not
    averaged) or 1/k² (divided twice), what gradients are multiplied by afterwards included. A last, shorter
    accumulation is not told from the others. That is a note, as a sum may be meant;
    `tilefit.precision.check_accumulation` replays the joined batch and makes it certain.

    Why nobody notices: The gradient is k times too large: the learning rate acts as k times, a clipping
    threshold as 1/k. Adam hides it.

    Wrong:

        for batch in micro_batches:
            loss_fn(model(batch)).backward()
        optimizer.step()

    Right:

        for batch in micro_batches:
            (loss_fn(model(batch)) / len(micro_batches)).backward()
        optimizer.step()

    Source: PyTorch, "Automatic Mixed Precision examples", gradient accumulation.
    """

    code = "AMP018"
    title = "accumulated losses are not averaged"
    needs = ("accumulation",)
    limit = "whether a last, shorter accumulation is divided by its own length"

    def check(self, event: events.Accumulated) -> Alarm | None:
        k, ratio, severity = event.passes, event.confirmed, WARNING
        proof = f"replayed: the accumulated gradient is {figure(ratio or 0)} times the joined batch's"
        if ratio is None:
            severity, ratio = NOTE, event.factor * k
            proof = f"each loss is a mean, multiplied by {figure(event.factor)}"
        if k == 1 or all(abs(ratio / wrong - 1) >= NEAR for wrong in (k, 1 / k)):
            return None
        wrong = "not divided by their number" if ratio > 1 else "divided by their number twice"
        acts = f"acts as {figure(ratio)} times, a clipping threshold as {figure(1 / ratio)} times"
        return self.alarm(
            event,
            f"{k} backward passes feed one step, and their losses are {wrong}",
            proof,
            f"the learning rate {acts}",
            severity=severity,
            fix=f"Divide each loss by {k}, once.",
        )


#: What is wrong, and what to do.
_TEXTS = {
    "parameters": (
        "parameters differ between ranks",
        "Wrap the model in DistributedDataParallel and call the wrapper, or broadcast the parameters at "
        "the start.",
    ),
    "gradients": (
        "gradients differ between ranks at the optimizer's step",
        "Call the DistributedDataParallel wrapper, not the model inside; leave no_sync before the last "
        "backward; change gradients on all ranks alike.",
    ),
    "scale": (
        "the loss scale differs between ranks",
        "Let every rank see the same inf: use one GradScaler after the all-reduce, or ShardedGradScaler.",
    ),
    "found_inf": (
        "some ranks skip the step and others do not",
        "All-reduce the gradients before unscaling them, or use ShardedGradScaler.",
    ),
    "steps": (
        "ranks have made different numbers of steps",
        "Give every rank the same number of batches: drop_last, or join().",
    ),
    "data": ("every rank reads the same batch", "Use a DistributedSampler, and call its set_epoch."),
}


class RankDrift(PrecisionRule[events.RanksDiffer]):
    """Ranks that should hold the same model do not, or all of them read the same data.

    What it sees: On watched steps each rank contributes a checksum of its parameters, its gradients, its
    batch, the scale, whether it skips, and its step count, in one exchange of a few integers. Parameters that
    differ mean drift; equal parameters with different gradients mean missing synchronisation. Sharded tensors
    are not compared.

    Why nobody notices: Each rank trains a model of its own; the loss that rank 0 prints looks fine, and the
    checkpoint it writes is the model of one rank's data.

    Wrong:

        ddp = DistributedDataParallel(model)
        loss_fn(model(x)).backward()

    Right:

        ddp = DistributedDataParallel(model)
        loss_fn(ddp(x)).backward()

    Source: PyTorch, `DistributedDataParallel`: gradients are synchronised by the wrapper's forward pass.
    """

    code = "AMP023"
    title = "ranks do not agree"
    severity = ERROR
    needs = ("several ranks",)

    def check(self, event: events.RanksDiffer) -> Alarm | None:
        message, fix = _TEXTS[event.what]
        figures = [f"{event.ranks} ranks"]
        if event.name:
            figures.append(f"first in {event.name}")
        if event.values:
            figures.append("by rank: " + ", ".join(map(figure, event.values)))
        severity = WARNING if event.what == "data" else ERROR
        return self.alarm(event, message, "; ".join(figures), severity=severity, fix=fix)


#: From so many terms on, the rounding of a half-precision sum is worth a word.
MANY = 64
#: A measured error above this is a warning.
LARGE = 0.01


class LowPrecisionGradientSum(PrecisionRule[events.HalfSum]):
    """Gradients of many ranks or micro-batches are added up in half precision.

    What it sees: The element type of the sum, and ranks times micro-batches from 64 on; where the
    micro-batches of a step are seen, the error of the half-precision sum against one in fp32. Above 1 % it is
    a warning.

    Why nobody notices: Each addition rounds. In bf16 the 64th of equal terms changes the sum by 1.6 %, and a
    rounding step is 0.4 %.

    Wrong:

        for batch in sixty_four_micro_batches:
            loss(model_in_bf16(batch)).backward()   # .grad is bf16

    Right:

        main_grad += p.grad.float()                 # accumulate in fp32

    Source: PyTorch FSDP, `MixedPrecisionPolicy(reduce_dtype=torch.float32)`.
    """

    code = "AMP024"
    title = "many gradients are summed in half precision"
    fix = "Sum in fp32: reduce_dtype=torch.float32, or fp32 main gradients."
    needs = ("half-precision weights",)

    def check(self, event: events.HalfSum) -> Alarm | None:
        if event.terms < MANY:
            return None
        error = event.error
        return self.alarm(
            event,
            f"{event.terms} gradients are summed in {event.dtype}",
            *([] if error is None else [f"error against fp32: {share(error)}"]),
            f"each addition rounds to 1/{2 ** SIGNIFICAND_BITS[event.dtype]} of the sum",
            severity=WARNING if error is not None and error > LARGE else NOTE,
        )
