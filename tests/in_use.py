"""Changed models in use: a plain model and its changed twin do the same thing, and the outcomes are compared.

Plans are made of every fix that can be made, whether it pays or not (``min_gain`` below zero), so that small
models have them too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from tilefit.errors import TilefitError
from tilefit.fixes import Plan

#: What a use does with a model; what it returns is compared.
Use = Callable[[Any], Any]


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An input of a size alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def planned(model: nn.Module, inputs: Any, *fixes: str, **options: Any) -> Plan:
    """The plan of a model, in place, with the named fixes (all without a name) wherever they can be made."""
    chosen = {"select": fixes} if fixes else {"ignore": ["compile", "cuda-graph"]}
    settings = {"gpu": "h200", "amp": "bf16", "optimizer": "none", "min_gain": -1e9}
    return tilefit.optimize(model, inputs, **{**settings, **chosen, **options})


def applied(plan: Plan) -> set[str]:
    """Names of the fixes in a plan."""
    return {fix.name for fix in plan.fixes}


def outcome(use: Use, model: nn.Module) -> Any:
    """What a use returns, or the error it raises."""
    torch.manual_seed(1)
    try:
        return use(model)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return error


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradient of each parameter; None where there is none."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def tried(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns, or the type of the error it raises."""

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
            return type(error).__name__

    return [result(call) for call in calls]


def difference(expected: Any, found: Any, tolerance: float = 1e-5, least: float = 0.0) -> str:
    """What differs between two outcomes, in words; empty if nothing does.

    Tensors are equal where class, shape, element type and ``requires_grad`` are, and the norm of the
    difference is at most ``tolerance`` times the norm (or ``least``, if that is more); not-a-number and
    infinities must be in the same places.
    Errors are equal where their types are.
    """
    if isinstance(expected, Exception) and type(expected) is type(found):
        return ""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return _tensor_difference(expected, found, tolerance, least)
    parts = _parts(expected), _parts(found)
    if type(expected) is type(found) and parts[0] and parts[0].keys() == parts[1].keys():
        texts = (
            (name, difference(part, parts[1][name], tolerance, least)) for name, part in parts[0].items()
        )
        return next((f"[{name}] {text}" for name, text in texts if text), "")
    if isinstance(expected, float) and isinstance(found, float):
        return _tensor_difference(torch.tensor(expected), torch.tensor(found), tolerance, least)
    is_leaf = not any(parts) and not isinstance(expected, torch.Tensor)
    same = type(expected) is type(found) and is_leaf and expected == found
    return "" if same else f"{_shown(expected)} became {_shown(found)}"


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _tensor_difference(expected: torch.Tensor, found: torch.Tensor, tolerance: float, least: float) -> str:
    if _kind(expected) != _kind(found):
        return f"{_kind(expected)} became {_kind(found)}"
    a, b = (tensor.detach().to(torch.float64, copy=True) for tensor in (expected, found))
    finite = a.isfinite()
    rest = (tensor[~finite].nan_to_num(0.5) for tensor in (a, b))
    if not torch.equal(finite, b.isfinite()) or not torch.equal(*rest):
        return "other values are infinite or no numbers"
    error, size = (a - b)[finite].norm().item(), a[finite].norm().item()
    return (
        "" if error <= tolerance * max(size, least) + 1e-30 else f"relative error {error / (size or 1):.1e}"
    )


def _kind(tensor: torch.Tensor) -> str:
    learns = ", with gradient" if tensor.requires_grad else ""
    return f"{type(tensor).__name__} {tuple(tensor.shape)} of {tensor.dtype}{learns}"


def _shown(value: Any) -> str:
    if isinstance(value, Exception):
        return f"{type(value).__name__} ({(str(value).strip() or 'no message').splitlines()[0][:120]})"
    return _kind(value) if isinstance(value, torch.Tensor) else " ".join(repr(value).split())[:120]


@dataclass(frozen=True)
class Case:
    """A model, a fix, and what is then done with the model.

    Attributes:
        name: Of the use.
        make: Makes the model.
        inputs: Those that the plan is made on.
        fix: Name of the fix.
        use: What is done with the plain model and with the changed one.
        refusable: What makes it difficult is in the model when it is planned, so that the fix may be refused.
            Otherwise it must be applied.
        options: More of the plan's.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Any
    fix: str
    use: Use
    refusable: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Plan, use and compare. A fix that was rightly not applied is reported as a skipped test."""
        torch.manual_seed(0)
        model = self.make()
        original = copy.deepcopy(model)
        try:
            plan = planned(model, self.inputs, self.fix, **self.options)
            names, reasons = applied(plan), [refused.reason for refused in plan.refused]
        except TilefitError as error:
            names, reasons = set(), [str(error)]
        assert self.fix in names or self.refusable, f"not applied: {reasons}"
        assert not (text := difference(outcome(self.use, original), outcome(self.use, model))), text
        if not names:
            pytest.skip(f"not applied: {'; '.join(reasons) or 'it is no candidate'}")


def use_of(
    cases: list[Case], make: Callable[[], nn.Module], inputs: Any, *fixes: str, **options: Any
) -> Callable[[Use], Use]:
    """Add a case for each fix to ``cases``; the decorated function is the use."""

    def add(use: Use) -> Use:
        name = use.__name__.strip("_")
        refusable = options.pop("refusable", False)
        cases.extend(
            Case(f"{name}-{fix}" if len(fixes) > 1 else name, make, inputs, fix, use, refusable, options)
            for fix in fixes
        )
        return use

    return add


def ids(cases: Iterable[Case]) -> list[str]:
    """Names of cases, for pytest."""
    return [case.name for case in cases]
