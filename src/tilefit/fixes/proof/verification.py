"""Is a changed model still the same model? Both are run, and everything that should be equal is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from tilefit.capture.copies import copied
from tilefit.errors import CaptureError
from tilefit.fixes.changes.fix import ChangeSet, RefusedError, applied
from tilefit.fixes.changes.run import Run
from tilefit.fixes.proof.likeness import few_rows, filled, likeness, shrunken, with_values
from tilefit.fixes.proof.scenarios import SCENARIOS, Observed, Scenario, Trial, is_float, seen

#: Largest relative error (norm of the difference over norm) that counts as rounding, by element type. The
#: coarse ones are what reordering the sums of a deep network does; a missing column shows in any of them.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: Tensors whose norm is below this share of all they are compared with (gradients that are zero but for
#: rounding) are compared at this scale.
_NEGLIGIBLE = 1e-3
#: The least norm that an error is related to.
_TINY = 1e-300
#: Parts that are called by themselves, at most: equal ones once. A choice.
_MOST_PARTS = 24


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
    the gradient of every parameter and input; then ``steps`` steps of SGD with momentum, and as many of
    AdamW, both with weight decay and clipped gradients: each loss, all parameters and buffers at their ends.
    Both models are copied and stay as they are.

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
    passes = SCENARIOS[: 3 if steps else 2]
    return _judged([error for each in passes for error in _compared(each, trial, original, fixed)], trial)


def prove(run: Run, changes: Sequence[ChangeSet]) -> Verification:
    """Compare the run's model with and without the changes on the CPU, in every scenario, on few inputs: the
    run's, random ones for those without values, smaller ones for large ones.

    The model itself is not touched. A parameter without a value (on ``meta``), or with one value everywhere
    (a bias of zeros), gets random ones. A large model is compared in a small one like it.

    Raises:
        RefusedError: the comparison cannot be made.
    """
    # As a default, the CPU sees every call, and takes its time.
    is_default = torch.get_default_device().type == "cpu"
    with nullcontext() if is_default else torch.device("cpu"), _comparing():
        like = likeness(run, changes)
        original = filled(like.run.model)
        fixed = replace(like.run, model=copied(original, "cpu"), live_optimizer=None)
        for change in like.changes:
            change.apply(fixed)
        trial = Trial(
            with_values(like.run.inputs, like.run.model),
            run.loss,
            same_random_numbers=all(change.same_random_numbers for change in like.changes),
            train=run.options.train,
        )
        trial = replace(trial, parts=_parts(trial, original, like.changes))
        own = next((p.dtype for p in run.model.parameters() if p.is_floating_point()), torch.float32)
        working = replace(trial, dtype=own, amp=run.options.autocast)
        parameters = sum(p.numel() for p in original.parameters()) if like.is_small else float("inf")
        found = _judged([], trial, like.scope)
        for scenario in SCENARIOS:
            if parameters > scenario.most or found.differences:
                continue
            how, must_run = working if scenario.working else trial, scenario in SCENARIOS[:2]
            new = _judged(_compared(scenario, how, original, fixed.model, must_run=must_run), how)
            worst = max(found.worst, 0.0 if scenario.working else new.worst)
            found = replace(
                found, compared=found.compared + new.compared, worst=worst, differences=new.differences
            )
        return found


def prove_in_place(run: Run, changes: Sequence[ChangeSet]) -> Verification:
    """Compare the model with and without the changes where it is, in its working precision, on two samples
    of the run's inputs; random ones where these have no values or one, smaller ones where they are large.

    In evaluation mode: outputs, loss and gradients. Nothing is copied but what is compared.

    Raises:
        RefusedError: a change does not apply, or the comparison cannot be made.
    """
    parameter = next(run.model.parameters())
    with _comparing():
        few = with_values(shrunken(run.inputs), run.model)
        trial = Trial(few, run.loss, run.options.autocast, parameter.dtype, str(parameter.device))
        with run.kept():
            run.model.eval()
            first = seen(SCENARIOS[0].tell(trial, run.model))
            with applied(run, map(few_rows, changes)):
                run.model.zero_grad()
                second = seen(SCENARIOS[0].tell(trial, run.model))
        return _judged(_differences(SCENARIOS[0], first, second), trial)


@contextmanager
def _comparing() -> Iterator[None]:
    """Within the block random numbers on the CPU are the same every time; afterwards the user's go on.

    Raises:
        RefusedError: the model raises in the comparison (in fp64, on few inputs, on a copy).
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # and no GPU's
        try:
            yield
        except RefusedError:
            raise
        except CaptureError as error:
            raise RefusedError(f"the model does not run on a copy ({error.what})") from error
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            raise RefusedError(f"the comparison raised {type(error).__name__}: {text.rstrip('.')}") from error


def _parts(trial: Trial, model: nn.Module, changes: Sequence[ChangeSet]) -> dict[str, tuple[Any, Any]]:
    """Changed modules and all that they are parts of, with the arguments of their first calls; of those that
    look alike the first."""
    names = [path.split(".") for change in changes for path in change.modules if path]
    paths = dict.fromkeys(".".join(each[:count]) for each in names for count in range(len(each), 0, -1))
    model = trial.prepared(model)
    modules = dict(model.named_modules())
    distinct = {repr(modules[path]): path for path in reversed(paths) if path in modules}
    arguments: dict[str, tuple[Any, Any]] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, path: str) -> None:
        if path not in arguments:
            arguments[path] = trial.fresh((args, kwargs))  # before the module changes them

    for path in [*distinct.values()][:_MOST_PARTS]:
        modules[path].register_forward_pre_hook(partial(record, path=path), with_kwargs=True)
    with trial.running(), torch.no_grad():
        trial.called(model, trial.fresh())
    return arguments


def _compared(
    scenario: Scenario, trial: Trial, original: nn.Module, fixed: nn.Module, *, must_run: bool = True
) -> list[Difference]:
    """What a scenario gives of two models; what the second raises is a difference.

    Where the original raises, either that is raised, or, if it need not run so, nothing is compared.
    """
    if scenario.training and not trial.train:
        return []
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
    return _differences(scenario, *observed)


def _judged(errors: Sequence[Difference], trial: Trial, scope: str = "whole model") -> Verification:
    """What was compared in one element type."""
    tolerance = TOLERANCES[trial.precision]
    return Verification(
        scope=scope,
        dtype=str(trial.precision).removeprefix("torch."),
        device=trial.device,
        tolerance=tolerance,
        compared=len(errors),
        worst=max((e.error for e in errors), default=0.0),
        differences=tuple(error for error in errors if not error.error <= tolerance),
    )


def _differences(scenario: Scenario, first: Observed, second: Observed) -> list[Difference]:
    """How far each observation of the second is from the first; or whether it is finite where that is."""
    scale = cache(lambda: _norm(value for value in first.values() if is_float(value)))
    errors = {}
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name), second.get(name)
        if not scenario.finite:
            errors[name] = _error(a, b, scale)
        elif is_float(a) and is_float(b) and a.shape == b.shape:
            errors[name] = float("inf") if (a.isfinite() & ~b.isfinite()).any() else 0.0
    return [Difference(f"{scenario.name}: {name}", error) for name, error in errors.items()]


def _error(a: Any, b: Any, scale: Callable[[], float]) -> float:
    if not (is_float(a) and is_float(b)):
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


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _norm(tensors: Iterable[Any]) -> float:
    """Of all finite elements."""
    finite = (t.detach().double().nan_to_num(0.0, 0.0, 0.0) for t in tensors)
    return float(sum(float(t.square().sum()) for t in finite) ** 0.5)
