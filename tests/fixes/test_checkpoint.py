"""Modules that are computed again in the backward pass, where a step needs more memory than it may take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.cost.recompute import Recompute
from tilefit.fixes import optimize
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.checkpoint import Checkpointed, unfit
from tilefit.ops import Step
from tilefit.options import StepOptions

GPU = resolve("h200")[0]


class Block(nn.Module):
    """A layer with all that could go wrong when it runs twice: dropout, statistics, a cache."""

    def __init__(self, norm: Callable[[], nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        if cache is not None:
            cache.append(x)
            x = x * len(cache)
        return x


class Net(nn.Module):
    """Layers, perhaps with a cache that each adds to."""

    def __init__(self, norm: Callable[[], nn.Module], dropout: float = 0.0, *, cached: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm, dropout) for _ in range(4))
        self.head = nn.Linear(16, 8)
        self.cached = cached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] | None = [] if self.cached else None
        for block in self.blocks:
            x = block(x=x, cache=cache)
        return self.head(x)


def _plain() -> nn.Module:
    return nn.LayerNorm(16)


def _captured(model: nn.Module, again: tuple[str, ...] = (), amp: Any = "off") -> Step:
    run = Run(copy.deepcopy(model), torch.empty(256, 16), StepOptions(amp=amp))
    if again:
        Checkpointed(again).apply(run)
    return run.capture()


def _trained(model: nn.Module) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        out = model(torch.randn(8, 16))
        out.square().mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "model",
    [
        Net(_plain),
        Net(_plain, dropout=0.5),
        Net(_plain, cached=True),
        Net(lambda: nn.BatchNorm1d(16)),
        Net(lambda: nn.BatchNorm1d(16, momentum=None), dropout=0.1),
    ],
    ids=["plain", "dropout", "cache", "statistics", "cumulative"],
)
def test_the_same_training_bit_for_bit(model: nn.Module) -> None:
    torch.manual_seed(1)
    changed = copy.deepcopy(model)
    paths = tuple(f"blocks.{number}" for number in range(3))
    edits = Checkpointed(paths).apply(Run(changed, torch.empty(8, 16)))
    expected, found = _trained(copy.deepcopy(model)), _trained(changed)
    assert all(map(torch.equal, expected, found))
    edits.undo()
    assert not any("forward" in vars(part) for part in changed.modules())


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("again", [("blocks.0",), ("blocks.1", "blocks.3"), ("blocks.0.norm", "blocks.2")])
def test_the_prediction_is_what_a_capture_of_the_changed_model_gives(
    amp: str, again: tuple[str, ...]
) -> None:
    model = Net(_plain)
    before = _captured(model, amp=amp)
    predicted = Recompute(before, estimate_step(before, GPU).ops).of(again)
    after = _captured(model, again, amp)
    assert predicted.peak_bytes == pytest.approx(after.memory.peak_bytes, rel=0.01)
    times = [sum(op.time_s for op in estimate_step(step, GPU).ops) for step in (before, after)]
    assert predicted.extra_s == pytest.approx(times[1] - times[0], rel=0.15)


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_a_budget_is_met_for_less_than_all(share: float) -> None:
    step = _captured(Net(_plain))
    search = Recompute(step, estimate_step(step, GPU).ops)
    every = search.of(f"blocks.{number}" for number in range(4))
    budget = every.peak_bytes + share * (step.memory.peak_bytes - every.peak_bytes)
    found = search.within(budget)
    assert found.peak_bytes <= budget
    assert found.extra_s <= every.extra_s
    assert search.within(step.memory.peak_bytes).modules == ()
    least = search.within(0)
    assert least.peak_bytes <= every.peak_bytes


def test_a_plan_that_fits_is_slower_and_proven() -> None:
    model, x = Net(_plain, dropout=0.1), torch.randn(256, 16)
    peak = _captured(model).memory.peak_bytes
    plan = optimize(model, x, gpu="h200", select=["checkpoint"], memory_bytes=0.8 * peak)
    assert [fix.name for fix in plan.fixes] == ["checkpoint"]
    assert plan.after_bytes <= 0.8 * peak < plan.before_bytes
    assert plan.after_s > plan.before_s
    assert plan.verification is not None
    assert plan.verification.ok
    assert plan.verification.worst == 0
    plan.undo()
    fits = optimize(model, x, gpu="h200", select=["checkpoint"], memory_bytes=peak)
    assert not fits.fixes
    cannot = optimize(model, x, gpu="h200", select=["checkpoint"], memory_bytes=1.0)
    assert not cannot.fixes
    assert "would still need" in cannot.refused[0].reason


def test_what_is_refused() -> None:
    model = Net(_plain)
    assert not unfit(model.blocks[0])
    assert "never called" in unfit(model.blocks)
    model.blocks[0].up.register_forward_hook(lambda *_: None)
    assert "hooks" in unfit(model.blocks[0])
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    with pytest.raises(RefusedError, match=r"blocks\.1 has parametrisations"):
        Checkpointed(("blocks.1",)).apply(Run(model, torch.empty(8, 16)))


class Counting(nn.Module):
    """It writes a buffer that is no statistics of a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.up(x))
        self.seen += x.detach().mean(0)
        return x * 2


def test_a_module_that_writes_a_buffer_is_left_alone() -> None:
    step = _captured(nn.Sequential(Counting(), nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))))
    assert "0" not in Recompute(step, estimate_step(step, GPU).ops).parts
    assert "1" in Recompute(step, estimate_step(step, GPU).ops).parts


def test_without_gradients_nothing_is_kept() -> None:
    model = Net(_plain)
    Checkpointed(("blocks.0",)).apply(Run(model, torch.empty(8, 16)))
    with torch.no_grad():
        assert not model(torch.randn(8, 16)).requires_grad
