"""Measuring with and without fixes: the turns they take, and that nothing of the model changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tilefit
from fixing import fixed
from tilefit.errors import UsageError
from tilefit.fixes import Run, planner
from tilefit.fixes.linear import PaddedLinear
from tilefit.fixes.measuring import step_times_s


class Clock:
    """Each forward pass takes a second, or a tenth if the layer is padded; nothing else takes time."""

    def __init__(self, model: nn.Module) -> None:
        self.now = 0.0
        model.register_forward_hook(self.tick)
        self.seen: list[bool] = []

    def tick(self, module: nn.Module, args: object, output: object) -> None:
        padded = isinstance(module[0], PaddedLinear)
        self.seen.append(padded)
        self.now += 0.1 if padded else 1.0

    def __call__(self) -> float:
        return self.now


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(13, 21), nn.BatchNorm1d(21), nn.Dropout(0.5), nn.Linear(21, 3))


def test_variants_take_turns_and_the_model_is_as_before() -> None:
    first = model()
    candidates = fixed(first, torch.empty(8192, 13, device="meta"), select=["pad-linear"]).candidates
    assert len(candidates) == 2
    run = Run(first.eval(), torch.randn(5, 13))
    first[0].bias.grad = torch.ones(21)
    state = copy.deepcopy(first.state_dict())
    clock = Clock(first)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    times = step_times_s(run, candidates, rounds=4, clock=clock)
    assert times == pytest.approx([1.0, 0.1, 0.1])
    assert not torch.equal(torch.tensor(clock.seen), torch.tensor(sorted(clock.seen)))
    assert torch.equal(torch.rand(1), expected)
    assert not first.training
    assert torch.equal(first[0].bias.grad, torch.ones(21))
    assert first[0].weight.grad is None
    assert not isinstance(first[0], PaddedLinear)
    for name, value in first.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_model_that_is_on_no_gpu_is_not_measured() -> None:
    with pytest.raises(UsageError, match="is on cpu"):
        tilefit.optimize(model(), torch.randn(5, 13), gpu="h200", measure=True)


@pytest.mark.parametrize(("times", "kept"), [([1.0, 0.5], 1), ([1.0, 1.1], 0), ([1.0, 1.004], 1)])
def test_what_was_measured_counts(times: list[float], kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "require_cuda", lambda run: None)
    monkeypatch.setattr(planner, "step_times_s", lambda run, candidates: times[: len(candidates) + 1])
    layer = nn.Linear(1024, 4095)
    plan = tilefit.optimize(
        layer, torch.empty(131072, 1024, device="meta"), gpu="h200", amp="bf16", select=["ALN"], measure=True
    )
    assert len(plan.fixes) == kept == isinstance(layer, PaddedLinear)
    assert plan.provenance == "measured"
    if kept:
        assert plan.fixes[0].measured_s == pytest.approx(times[0] - times[1])
        assert plan.speedup == pytest.approx(times[0] / times[1])
    else:
        assert any("no gain" in refused.reason for refused in plan.refused)
        assert plan.speedup == 1.0
