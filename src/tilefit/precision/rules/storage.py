"""Values kept in half precision, sums of gradients, and ranks that should agree."""

from __future__ import annotations

from collections.abc import Mapping

from tilefit.precision.rules.base import SIGNIFICAND_BITS, PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm
from tilefit.units import share

#: Below this share of the intended movement, updates count as lost.
LOST = 0.5
#: Steps from which on that is certain.
ENOUGH = 30
#: How near a factor must be to 1, 1/k or 1/k² to be taken for it.
NEAR = 0.05
#: From so many terms on, the rounding of a half-precision sum is worth a word.
MANY = 64
#: A measured error above this is a warning.
LARGE = 0.01


class Movement(PrecisionRule):
    """How far half-precision values moved, compared with where fp32 arithmetic would have moved them."""

    #: Element type.
    dtype: str
    #: Steps from the first look to the last, and values looked at in all of them.
    steps: int
    number: int
    #: actual · intended / intended²: 1 healthy, 0 lost.
    projection: float

    def lost(self, subject: str, severity: str = "") -> Alarm | None:
        """What is wrong where most of the movement is lost."""
        if self.projection >= LOST:
            return None
        part, made = 2 ** (SIGNIFICAND_BITS[self.dtype] + 1), share(max(0.0, self.projection))
        message = f"{subject} {made} of the change intended, over {self.steps} steps"
        rounded = f"a change below 1/{part} of a value is rounded away in {self.dtype}"
        projection = f"projection on fp32: {figure(self.projection)}, on {self.number} values"
        return self.alarm(message, rounded, projection, severity=severity)


class UpdateBelowUlp(Movement, code="AMP013", needs=("half-precision weights",), values=True):
    """Weights in half precision do not move, because each update is too small to change them.

    What it sees: The first 32 steps are made again by the same optimizer in fp32 on up to 1024 values of each
    half-precision parameter, with the same gradients and state. The projection of the actual movement on that
    is about 1 where all is well, also with stochastic rounding, Kahan summation or fp32 master weights, and
    about 0 where the updates are lost. Under other optimizers, and where there is none, each operation that
    updates such weights is repeated in fp32 on watched steps: a note, as the code may keep elsewhere what is
    rounded away. In a run of 3 to 29 steps it is a note, too. It is never looked at for fp32 parameters.

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

    title = "updates are lost to rounding"
    fix = (
        "Keep the weights in fp32 and use autocast, or an optimizer with fp32 master weights, stochastic "
        "rounding or Kahan summation."
    )

    #: The user's own code updates the weights.
    by_hand: bool = False

    def judge(self) -> Alarm | None:
        severity = WARNING if self.steps >= ENOUGH and not self.by_hand else NOTE
        return self.lost(f"{self.dtype} weights make", severity)


class OptimizerStateInHalf(PrecisionRule, code="AMP014", needs=("half-precision weights",)):
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

    title = "optimizer state in half precision"
    fix = "Keep the weights in fp32 and use autocast, or an optimizer with fp32 state."

    dtype: str
    #: The optimizer's constants as they are, and rounded to the type in which it keeps its state; ``decay``
    #: is 1 - lr * weight_decay, which weights are multiplied by. Those it lacks are left out.
    constants: Mapping[str, tuple[float, float]]

    def judge(self) -> Alarm | None:
        dtype, lost, severity = self.dtype, [], WARNING
        for name, (value, rounded) in self.constants.items():
            if name == "eps" and value and rounded == 0:
                lost.append(f"eps {figure(value)} is 0 in {dtype}: 0/0 where a gradient is 0")
                severity = ERROR
            elif name == "beta2" and value != 1 == rounded:
                lost.append(f"beta2 {value:g} is 1 in {dtype}: the second moment never decays")
            elif name == "decay" and value != 1 == rounded:
                lost.append(f"1 - lr * weight_decay is 1 in {dtype}: no weight decays")
        message = f"{self.module} keeps its state in {dtype}, where its constants are rounded away"
        return self.alarm(message, *lost, severity=severity) if lost else None


class HalfAccumulator(Movement, code="AMP015", closely=True, values=True):
    """A running average or sum in half precision no longer changes.

    What it sees: A half-precision tensor that is no parameter and that several steps change, in place through
    any alias of it, or by a new tensor made of the old one, by way of fp32 too; the state of optimizers that
    are not PyTorch's. It is the change that happened on watched steps, projected on the change that fp32
    arithmetic makes of the same values. Compensated sums and stochastic rounding are not accused. What stalls
    only later than that is not seen.

    Why nobody notices: A moving average with decay 0.9999 changes by 1e-4 of its distance in each step, which
    bf16 rounds to nothing: the averaged model is the initial one. A sum of ones stops at 256 in bf16, at
    2048 in fp16.

    Wrong:

        ema.mul_(0.9999).add_(p.bfloat16(), alpha=1e-4)   # ema is bf16

    Right:

        ema.mul_(0.9999).add_(p, alpha=1e-4)              # ema is fp32

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020), on nearest rounding of small updates.
    """

    title = "a half-precision average stops moving"
    limit = "a sum that stalls only later than the steps watched"
    fix = "Keep running sums and averages in fp32."

    def judge(self) -> Alarm | None:
        return self.lost(f"a {self.dtype} tensor that is updated in place makes")


class AccumulationNotAveraged(PrecisionRule, code="AMP018", needs=("accumulation",)):
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

    title = "accumulated losses are not averaged"
    limit = "whether a last, shorter accumulation is divided by its own length"

    #: Backward passes that feed one step, and what each loss was multiplied by.
    passes: int
    factor: float
    #: Accumulated gradient over the gradient of the joined batch (a projection), where a replay was made.
    confirmed: float | None = None

    def judge(self) -> Alarm | None:
        k, ratio, severity = self.passes, self.confirmed, WARNING
        proof = f"replayed: the accumulated gradient is {figure(ratio or 0)} times the joined batch's"
        if ratio is None:
            severity, ratio = NOTE, self.factor * k
            proof = f"each loss is a mean, multiplied by {figure(self.factor)}"
        if k == 1 or all(abs(ratio / wrong - 1) >= NEAR for wrong in (k, 1 / k)):
            return None
        wrong = "not divided by their number" if ratio > 1 else "divided by their number twice"
        message = f"{k} backward passes feed one step, and their losses are {wrong}"
        acts = f"acts as {figure(ratio)} times, a clipping threshold as {figure(1 / ratio)} times"
        fix = f"Divide each loss by {k}, once."
        return self.alarm(message, proof, f"the learning rate {acts}", severity=severity, fix=fix)


#: What is wrong, and what to do.
_TEXTS = {
    "parameters": "parameters differ between ranks",
    "gradients": "gradients differ between ranks at the optimizer's step",
    "scale": "the loss scale differs between ranks",
    "found_inf": "some ranks skip the step and others do not",
    "steps": "ranks have made different numbers of steps",
    "data": "every rank reads the same batch",
}
_FIXES = {
    "parameters": "Call the DistributedDataParallel wrapper, or broadcast the parameters at the start.",
    "gradients": "Call the DDP wrapper, not the model inside; leave no_sync before the last backward.",
    "scale": "Let every rank see the same inf: one GradScaler after the all-reduce, or ShardedGradScaler.",
    "found_inf": "All-reduce the gradients before unscaling them, or use ShardedGradScaler.",
    "steps": "Give every rank the same number of batches: drop_last, or join().",
    "data": "Use a DistributedSampler, and call its set_epoch.",
}


class RankDrift(PrecisionRule, code="AMP023", severity=ERROR, needs=("several ranks",)):
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

    title = "ranks do not agree"

    #: ``parameters``, ``gradients``, ``scale``, ``found_inf``, ``steps`` or ``data`` (which is the same on
    #: every rank).
    what: str
    ranks: int
    #: The first parameter concerned, if it is about parameters or gradients.
    name: str = ""
    #: A value per rank, where it is about a number.
    by_rank: tuple[float, ...] = ()

    def judge(self) -> Alarm:
        first = [f"first in {self.name}"] if self.name else []
        by_rank = ["by rank: " + ", ".join(map(figure, self.by_rank))] if self.by_rank else []
        figures = "; ".join((f"{self.ranks} ranks", *first, *by_rank))
        severity = WARNING if self.what == "data" else ""
        return self.alarm(_TEXTS[self.what], figures, severity=severity, fix=_FIXES[self.what])


class LowPrecisionGradientSum(PrecisionRule, code="AMP024", needs=("half-precision weights",)):
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

    title = "many gradients are summed in half precision"
    fix = "Sum in fp32: reduce_dtype=torch.float32, or fp32 main gradients."

    dtype: str
    #: Gradients that were summed: ranks times micro-batches.
    terms: int
    #: The relative error against a sum in fp32; None where that was not measured.
    error: float | None = None

    def judge(self) -> Alarm | None:
        if self.terms < MANY:
            return None
        error = [] if self.error is None else [f"error against fp32: {share(self.error)}"]
        rounds = f"each addition rounds to 1/{2 ** SIGNIFICAND_BITS[self.dtype]} of the sum"
        severity = WARNING if self.error is not None and self.error > LARGE else NOTE
        message = f"{self.terms} gradients are summed in {self.dtype}"
        return self.alarm(message, *error, rounds, severity=severity)
