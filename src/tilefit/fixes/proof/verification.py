"""Is a changed model still the same model? Both are run, and everything that should be equal is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import nn

from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.fixes.changes.fix import ChangeSet, applied
from tilefit.fixes.changes.run import Run
from tilefit.fixes.proof.scenarios import SCENARIOS, Observed, Scenario, Trial, seen
from tilefit.fixes.proof.scenarios import in_double as in_double

#: Largest relative error (norm of the difference over norm) that counts as rounding, by element type. The
#: coarse ones are what reordering the sums of a deep network does; a missing column shows in any of them.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: Tensors whose norm is below this share of all they are compared with (gradients that are zero but for
#: rounding) are compared at this scale.
_NEGLIGIBLE = 1e-3
#: The least norm that an error is related to.
_TINY = 1e-300
#: Largest difference in fp64 between two ways to write one function.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was compared.

    Attributes:
        what: ``eval: gradient of lm_head.weight``.
        error: Norm of the difference over the norm of the original's; infinite where shapes or values that
            must be equal are not.
    """

    what: str
    error: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The proof, or what speaks against it.

    Attributes:
        scope: What was compared: ``whole model``, or the paths of the changed modules.
        dtype: Element type of the comparison.
        device: Where it ran.
        tolerance: Largest relative error allowed (in the run's own precision that of its type).
        compared: How many tensors (outputs, losses, gradients, parameters after steps) were compared.
        worst: The largest relative error among them.
        differences: Those beyond the tolerance, in the order of the computation; empty for a proof.
    """

    scope: str
    dtype: str
    device: str
    tolerance: float
    compared: int
    worst: float
    differences: tuple[Difference, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Nothing differs, and something was compared."""
        return self.compared > 0 and not self.differences

    def __str__(self) -> str:
        if not self.compared:
            return f"{self.scope}: nothing could be compared"
        if self.ok:
            return (
                f"{self.scope}: {self.compared} tensors agree in {self.dtype} on {self.device}, largest "
                f"relative error {self.worst:.1e} (allowed {self.tolerance:.0e})"
            )
        first = self.differences[0]
        return (
            f"{self.scope}: {len(self.differences)} of {self.compared} tensors differ in {self.dtype}, first "
            f"{first.what} (relative error {first.error:.1e}, allowed {self.tolerance:.0e})"
        )


def verify(
    original: nn.Module,
    fixed: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    amp: str = "",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    train: bool = True,
    steps: int = 3,
    same_random_numbers: bool = True,
) -> Verification:
    """Compare two models: outputs, loss, gradients, and parameters after optimizer steps.

    In evaluation mode (dropout off) and, with ``train``, in training mode with the same seed: outputs, loss,
    the gradient of every parameter and input; then ``steps`` steps of SGD with momentum and weight decay, and
    of AdamW with clipped gradients: each loss, all parameters and buffers at the end. Both models are copied
    and stay as they are.

    Args:
        original: A module.
        fixed: One with the same parameters.
        inputs: As for :func:`tilefit.check`, with values; use few and small ones.
        loss: Makes the loss of the output; without it the output's ``loss``, else the distance of
            all outputs to random numbers.
        amp: Autocast element type, empty for none.
        dtype: Element type of parameters and floating-point inputs.
        device: Where to run.
        same_random_numbers: Both draw the same numbers from a seed; otherwise training mode is compared
            without dropout.
    """
    trial = Trial(inputs, loss, amp, dtype, device, same_random_numbers, train=train, steps=steps)
    passes = SCENARIOS[: 4 if steps else 2]
    errors = [
        error
        for each in passes
        if train or not each.training
        for error in compared(each, trial, original, fixed)
    ]
    return judged(errors, "whole model", AMP_DTYPES[amp] if amp else dtype, device)


def compared(
    scenario: Scenario, trial: Trial, original: nn.Module, fixed: nn.Module, *, must_run: bool = True
) -> list[Difference]:
    """What a scenario gives of two models; what the second raises is a difference.

    Where the original raises, either that is raised, or, if it need not run so, nothing is compared.
    """
    observed: list[Observed] = []
    with trial.running():
        for model in (original, fixed):
            try:
                observed.append(scenario.observe(trial, model))
            except Exception as error:
                if must_run:
                    raise
                what = f"{scenario.name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
                is_difference = observed and not scenario.may_raise
                return [Difference(what, float("inf"))] if is_difference else []
    first, second = observed
    return _differences(scenario.name, first, second, finite=scenario.finite)


def verify_in_place(run: Run, changes: Iterable[ChangeSet]) -> Verification:
    """Compare the model with itself changed, where it is and in its working precision, in evaluation mode.

    Outputs, loss and gradients of parameters and inputs. Nothing is copied but what is compared; afterwards
    the model is as it was.
    """
    parameter = next(run.model.parameters())
    trial = Trial(run.inputs, run.loss, run.options.autocast, parameter.dtype, str(parameter.device))
    with run.kept():
        run.model.eval()
        first = seen(trial.passed(run.model, trial.fresh(grad=True)))
        with applied(run, changes):
            run.model.zero_grad()
            second = seen(trial.passed(run.model, trial.fresh(grad=True)))
    errors = _differences("eval", first, second)
    dtype = AMP_DTYPES.get(run.options.autocast, parameter.dtype)
    return judged(errors, "whole model", dtype, str(parameter.device))


def judged(errors: Iterable[Difference], scope: str, dtype: torch.dtype, device: str) -> Verification:
    """What was compared in one element type."""
    errors, tolerance = list(errors), TOLERANCES[dtype]
    return Verification(
        scope=scope,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        tolerance=tolerance,
        compared=len(errors),
        worst=max((e.error for e in errors), default=0.0),
        differences=tuple(error for error in errors if not error.error <= tolerance),
    )


def _differences(scenario: str, first: Observed, second: Observed, finite: bool = False) -> list[Difference]:
    """How far each observation of the second is from the first; ``finite``: where that is, it is to be."""
    scale = cache(lambda: _norm(value for value in first.values() if _is_float(value)))
    errors = {}
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name), second.get(name)
        if not finite:
            errors[name] = _error(a, b, scale)
        elif _is_float(a) and _is_float(b) and a.shape == b.shape:
            errors[name] = float("inf") if (a.isfinite() & ~b.isfinite()).any() else 0.0
    return [Difference(f"{scenario}: {name}", error) for name, error in errors.items()]


def _error(a: Any, b: Any, scale: Callable[[], float]) -> float:
    if not (_is_float(a) and _is_float(b)):
        return 0.0 if _equal(a, b) else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    off = (a.double() - b.double()).where(~same, 0.0)
    if not off.isfinite().all():
        return float("inf")
    return _norm([off]) / max(_norm([a]), _NEGLIGIBLE * scale(), _TINY)


def _is_float(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _norm(tensors: Iterable[Any]) -> float:
    """Of all finite elements."""
    finite = (t.detach().double().nan_to_num(0.0, 0.0, 0.0) for t in tensors)
    return float(sum(float(t.square().sum()) for t in finite) ** 0.5)
