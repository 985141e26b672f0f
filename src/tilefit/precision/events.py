"""What trackers observe and rules judge: plain data, without torch.

Scales are numbers, element types are written as in ``torch.float16`` without the ``torch.``, and ``source``
is ``file:line`` of the user's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Event:
    """Something that happened in the run: where, in which module, and by name all the rest.

    Attributes:
        source: The line of the user's code.
        module: The module, parameter or optimizer it happened to, if known.
        seen: Everything it was concluded from was seen; else a part is inferred.
    """

    source: str = ""
    module: str = ""
    seen: bool = field(default=True, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)


# ---- the gradient scale ------------------------------------------------------------------------


class GradientsClipped(Event):
    """Gradients were clipped while they carried a scale.

    Attributes:
        limit: The threshold, or None where the user clips with code of their own.
        scale: What the gradients were multiplied by.
        certain: The factor is known to come from the gradients themselves.
    """

    limit: float | None
    scale: float
    certain: bool = True


class GradientsWritten(Event):
    """An operation that does not commute with the scale wrote to so many gradients that carry one."""

    operation: str
    scale: float
    parameters: int


class ScaledStep(Event):
    """An optimizer stepped on gradients that still carried a scale.

    Attributes:
        scale: The scale.
        lr, eps, weight_decay: The optimizer's, of its first group; None where it has none.
        adaptive: It divides by the gradients' own size, as Adam does.
    """

    scale: float
    lr: float | None
    eps: float | None
    weight_decay: float | None
    adaptive: bool


class RepeatedStep(Event):
    """An optimizer stepped again on gradients it had already used.

    Attributes:
        skipped: The scaler had skipped the step before because of inf or NaN.
        scaler: The second step went through the scaler, which divides by the scale once more.
    """

    skipped: bool
    scaler: bool


class WrongDivision(Event):
    """Gradients were divided by a scale that is not the one they carry.

    Attributes:
        kind: ``again`` (they had been divided before), ``older`` (they carry the scale before an update),
            ``mixed`` (parts with and without a scale), ``spread`` (parts of different scales) or ``plain``
            (they carry none).
        scale: What they are divided by.
        carried: The scale they carry, where it is one and known.
        other: The optimizer that stepped between the backward pass and this division, if one did.
        parameters: How many gradients.
        by_hand: It was the user's own code that divided.
    """

    kind: str
    scale: float
    carried: float | None = None
    other: str = ""
    parameters: int = 0
    by_hand: bool = False


class MixedLoss(Event):
    """One backward pass started from a sum of which only a part was scaled; ``scale`` is that part's."""

    scale: float


class ScalerRefused(Event):
    """A method of the gradient scaler raised; of the optimizer's weights, some are in half precision."""

    method: str
    error: str
    half_weights: int = 0
    weights: int = 0


class ScalerUsed(Event):
    """The gradient scaler stepped an optimizer after forward passes in these autocast element types."""

    dtypes: frozenset[str]


class ScaleHistory(Event):
    """So many steps in a row were skipped; whether the unscaled losses were finite, None where unknown."""

    scale: float
    skipped: int
    loss_finite: bool | None


class SchedulerStepped(Event):
    """A scheduler that steps with the optimizer stepped although the scaler had skipped the optimizer's step:
    so often, of so many steps that were asked for."""

    skipped: int
    steps: int


class ScalerNotSaved(Event):
    """An optimizer's state was saved, and the state of the scaler that steps it was not."""


class ScalerNotLoaded(Event):
    """An optimizer's state was loaded, and the scaler scaled a loss without having been loaded."""


class ResumeDiffers(Event):
    """A resumed run gave another loss than the run that was saved, ``step`` steps after the checkpoint."""

    step: int
    expected: float
    got: float


# ---- autocast, losses and graphs ---------------------------------------------------------------


class UnscaledHalf(Event):
    """An optimizer stepped on gradients that went through fp16 without a loss scale; of so many values looked
    at there, the shares that are too small for full precision, and exactly zero."""

    values: int
    subnormal: float
    zero: float


class StaleCache(Event):
    """So many weights were changed inside an autocast region that goes on using their old copies."""

    parameters: int


class GradientLost(Event):
    """A weight took part in a forward pass, its output got a gradient, and it got none itself."""


class LossInHalf(Event):
    """The loss was computed in half precision.

    Attributes:
        operation: The operation that made the scalar.
        dtype: ``float16`` or ``bfloat16``.
        autocast: An autocast region was active in the step.
        scale: What the scaler multiplied it by, or None without one.
    """

    operation: str
    dtype: str
    autocast: bool
    scale: float | None


class HalfWeights(Event):
    """While autocast is on, so many of an optimizer's trainable weights are in half precision."""

    dtype: str
    half: int
    weights: int


class BackwardDtype(Event):
    """Something ran in another precision in the backward pass than in the forward pass.

    Attributes:
        kind: ``function`` (a custom autograd Function), ``region`` (an autocast region entered while going
            backward) or ``recompute`` (a module's second forward pass).
        name: The class or the module.
        forward, backward: Element types.
    """

    kind: str
    name: str
    forward: str
    backward: str


class EvaluationDtype(Event):
    """The model was evaluated in another precision than it is trained in; ``float32`` means no autocast."""

    training: str
    evaluation: str


class Accumulated(Event):
    """Several backward passes fed one step.

    Attributes:
        passes: How many.
        factor: What each loss was multiplied by.
        confirmed: Accumulated gradient over the gradient of the joined batch (a projection), where a replay
            was made; else None.
    """

    passes: int
    factor: float
    confirmed: float | None = None


# ---- numerics ----------------------------------------------------------------------------------


class OperationChecked(Event):
    """A half-precision operation gave something else than fp32 gives for the same input.

    Attributes:
        operation, dtype: Its name and element type.
        overflowed: Share of results that are inf or NaN where fp32's are finite.
        vanished: Share of results that are zero where fp32's are not.
        error_ulp: Largest error, in units of the element type's spacing at the result.
        largest: Largest finite result in fp32.
    """

    operation: str
    dtype: str
    overflowed: float
    vanished: float
    error_ulp: float
    largest: float


class MaskOverflowed(Event):
    """A sum of finite numbers became -inf and went into a softmax; ``rows`` of them are -inf throughout."""

    dtype: str
    rows: int


class IntegersMerged(Event):
    """A cast to half precision merged or rounded values.

    Attributes:
        dtype: The element type cast to.
        integral: All values were whole numbers; else they were a sorted table.
        largest: The largest magnitude.
        before, after: Distinct values of those looked at.
        rounded: How many of them are not exact any more.
        likely_data: They are not used as positions or steps are: whole numbers by accident.
    """

    dtype: str
    integral: bool
    largest: float
    before: int
    after: int
    rounded: int = 0
    likely_data: bool = False


class Movement(Event):
    """How far half-precision values moved, compared with where fp32 arithmetic would have moved them.

    Attributes:
        dtype: Element type.
        steps: Updates looked at.
        projection: actual · intended / intended²: 1 healthy, 0 lost.
        parameter: An optimizer's parameters; else a tensor the user keeps.
        values: Elements looked at.
    """

    dtype: str
    steps: int
    projection: float
    parameter: bool
    values: int


class HalfState(Event):
    """An optimizer's constants as they are, None where it has none, and rounded to the half-precision type in
    which it keeps its state; ``decay`` is 1 - lr * weight_decay, which weights are multiplied by."""

    dtype: str
    eps: float | None = None
    eps_rounded: float | None = None
    beta2: float | None = None
    beta2_rounded: float | None = None
    decay: float | None = None
    decay_rounded: float | None = None


class NonFinite(Event):
    """The first operation of a step whose inputs were finite and whose output was not; ``weights`` where the
    weights were not finite before the step. The phase is ``forward`` or ``backward``."""

    operation: str
    phase: str
    dtype: str


# ---- ranks, comparisons ------------------------------------------------------------------------


class RanksDiffer(Event):
    """Ranks that should agree do not, or the reverse.

    Attributes:
        what: ``parameters``, ``gradients``, ``scale``, ``found_inf``, ``steps`` or ``data`` (which is the
            same on every rank).
        ranks: How many ranks there are.
        name: The first parameter concerned, if it is about parameters or gradients.
        values: A value per rank, where it is about a number.
    """

    what: str
    ranks: int
    name: str = ""
    values: tuple[float, ...] = ()


class HalfSum(Event):
    """So many gradients (ranks times micro-batches) were summed in half precision, with this relative error
    against a sum in fp32; None where that was not measured."""

    dtype: str
    terms: int
    error: float | None = None


class LayerError(Event):
    """A module's error against fp32.

    Attributes:
        what: ``output`` or ``weight gradient``.
        local: Relative error of the module fed with the half-precision input.
        end_to_end: Relative error including what came before.
        tolerance: The error that perturbing its input by the element type's epsilon makes in fp32.
    """

    what: str
    local: float
    end_to_end: float
    tolerance: float


class Diverged(Event):
    """Two replays of the same step differ, first in this module; ``calls`` modules ran before it did."""

    calls: int
    deterministic: bool
