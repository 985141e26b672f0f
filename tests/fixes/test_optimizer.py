"""The fused optimizer updates as the optimizer did, from wherever a run has got to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.settings import fused

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:]}], lr=1e-2
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        x = torch.randn(5, 4, dtype=torch.double, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fuse(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    model = nn.Identity()
    for group in optimizer.param_groups:
        model._parameters.update({str(id(p)): p for p in group["params"]})
    return fused("adamw").apply(Run(model, live_optimizer=optimizer)).undo


def assert_same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 3])
def test_training_goes_on_as_it_would_have(make: Make, trained: int) -> None:
    model, other = network(), network()
    optimizer, fused = make(list(model.parameters())), make(list(other.parameters()))
    train(model, optimizer, trained)
    train(other, fused, trained)
    undo = fuse(fused)
    assert all(group["fused"] and not group["foreach"] for group in fused.param_groups)
    for steps in (1, 4):
        train(model, optimizer, steps)
        train(other, fused, steps)
    assert_same(model, other)
    undo()
    assert [dict(g, params=0) for g in fused.param_groups] == [
        dict(g, params=0) for g in optimizer.param_groups
    ]
    train(model, optimizer, 2)
    train(other, fused, 2)
    assert_same(model, other)


def test_checkpoints_go_both_ways() -> None:
    model = network()
    fused = OPTIMIZERS["adamw"](list(model.parameters()))
    fuse(fused)
    train(model, fused, 3)
    other = copy.deepcopy(model)
    plain = OPTIMIZERS["adamw"](list(other.parameters()))
    checkpoint = copy.deepcopy(fused.state_dict())
    for group in checkpoint["param_groups"]:
        group["fused"] = None
    plain.load_state_dict(checkpoint)
    train(model, fused, 2)
    train(other, plain, 2)
    assert_same(model, other)
    fused.load_state_dict(plain.state_dict())


class Own(torch.optim.AdamW):
    """Somebody's own optimizer."""


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda p: Own(p), "no fused form"),
        (lambda p: torch.optim.RMSprop(p), "no fused form"),
        (lambda p: torch.optim.AdamW(p, foreach=False), "one tensor at a time"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable"),
        (
            lambda p: torch.optim.AdamW([torch.zeros(2, dtype=torch.complex64, requires_grad=True)]),
            "complex64",
        ),
    ],
)
def test_refusals(optimizer: Make, reason: str) -> None:
    found = optimizer(list(network().parameters()))
    before = [dict(group) for group in found.param_groups]
    with pytest.raises(RefusedError, match=reason):
        fuse(found)
    assert [dict(group) for group in found.param_groups] == before


def test_the_plan_changes_the_optimizer_itself() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = tilefit.optimize(
        model, torch.empty(64, 1024), gpu="h200", optimizer=optimizer, select=["fuse-optimizer"]
    )
    (fix,) = plan.fixes
    assert fix.level == "safe"
    assert fix.gain_s > 0
    assert plan.run.options.fused_optimizer
    assert optimizer.param_groups[0]["fused"]
    plan.undo()
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("options", [{"fused_optimizer": True}, {"train": False}, {"optimizer": "none"}])
def test_nothing_to_do(options: dict[str, Any]) -> None:
    model = nn.Linear(1024, 1024)
    assert not tilefit.optimize(
        model, torch.empty(64, 1024), gpu="h200", select=["fuse-optimizer"], **options
    ).fixes


def planned_with(make: Make) -> tilefit.Plan:
    """The plan of four layers, trained by an optimizer that is passed in."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = make(list(model.parameters()))
    return tilefit.optimize(
        model, torch.empty(64, 1024), gpu="h200", optimizer=optimizer, select=["fuse-optimizer"]
    )


def test_the_options_of_an_optimizer_count() -> None:
    plain = planned_with(lambda p: torch.optim.Adam(p))
    assert plain.fixes[0].summary == "Run adam as one fused kernel (fused=True)."
    fused = planned_with(lambda p: torch.optim.Adam(p, fused=True))
    assert not fused.fixes
    assert fused.before_s == pytest.approx(plain.after_s)
    one_by_one = planned_with(lambda p: torch.optim.Adam(p, foreach=False))
    assert one_by_one.before_s > plain.before_s
    assert "one tensor at a time" in one_by_one.refused[0].reason
    part = planned_with(lambda p: torch.optim.Adam([{"params": p[:1]}, {"params": p[1:2]}]))
    assert part.before_bytes < plain.before_bytes


def test_an_optimizer_that_needs_values() -> None:
    with pytest.raises(tilefit.errors.UsageError, match=r"the step of LBFGS cannot be captured.*\n.*none"):
        planned_with(lambda p: torch.optim.LBFGS(p))
