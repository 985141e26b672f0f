"""Measuring with and without fixes: the turns they take, and that nothing of the model changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from behaving import Change, Faster, Slow, as_relu, same
from tilefit.errors import UsageError
from tilefit.fixes import ChangeSet, Edits, RefusedError, Run
from tilefit.fixes.changes.behaviour import behaviours
from tilefit.fixes.planning import planner, registry
from tilefit.fixes.planning.measuring import RunningStep, step_times_s
from tilefit.options import StepOptions


class Clock:
    """Each forward pass takes a second, or a tenth if its first layer is changed; nothing else takes time."""

    def __init__(self, model: nn.Module) -> None:
        self.now = 0.0
        model.register_forward_hook(self.tick)
        self.seen: list[bool] = []

    def tick(self, module: nn.Module, args: object, output: object) -> None:
        changed = bool(behaviours(module[0]))
        self.seen.append(changed)
        self.now += 0.1 if changed else 1.0

    def __call__(self) -> float:
        return self.now


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(13, 21), nn.BatchNorm1d(21), nn.Dropout(0.5), nn.Linear(21, 3))


def test_variants_take_turns_and_the_model_is_as_before() -> None:
    first = model()
    candidates = [Change(("0",), same), Change(("3",), same)]
    run = Run(first.eval(), torch.randn(5, 13))
    first[0].bias.grad = torch.ones(21)
    state = copy.deepcopy(first.state_dict())
    clock = Clock(first)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    times = step_times_s(run, candidates, rounds=4, clock=clock)
    assert times == [pytest.approx([time_s] * 4) for time_s in (1.0, 0.1, 0.1)]
    assert not torch.equal(torch.tensor(clock.seen), torch.tensor(sorted(clock.seen)))
    assert torch.equal(torch.rand(1), expected)
    assert not first.training
    assert torch.equal(first[0].bias.grad, torch.ones(21))
    assert first[0].weight.grad is None
    assert not behaviours(first[0])
    for name, value in first.state_dict().items():
        assert torch.equal(value, state[name])


def test_variants_share_an_optimizer_unless_it_is_another() -> None:
    run = Run(model(), torch.randn(5, 13))
    optimizers: dict[object, torch.optim.Optimizer] = {}
    first, second = RunningStep(run, optimizers), RunningStep(run, optimizers)
    assert first.optimizer is second.optimizer
    run.change(fused_optimizer=True)
    fused = RunningStep(run, optimizers)
    assert fused.optimizer is not first.optimizer
    assert [step.optimizer.param_groups[0]["fused"] for step in (first, fused)] == [None, True]
    assert fused.optimizer.param_groups[0]["lr"] == 0


def test_gradients_are_clipped_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped: list[float] = []
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda parameters, norm: clipped.append(norm))
    RunningStep(Run(model(), torch.randn(5, 13), StepOptions(clip=0.5)))()
    assert clipped == [0.5]


def test_a_model_that_is_on_no_gpu_is_not_measured() -> None:
    with pytest.raises(UsageError, match="is on cpu"):
        tilefit.optimize(model(), torch.randn(5, 13), gpu="h200", measure=True)


class Timer:
    """Takes the place of ``step_times_s``: a step takes a second, less what its fixes save."""

    #: Milliseconds by which seven equal measurements differ.
    NOISE = (0.0, 4.0, -3.0, 1.0, -1.0, 3.0, -4.0)

    def __init__(self, saved_ms: list[float]) -> None:
        self.saved_ms = saved_ms
        self.saved_by: dict[ChangeSet, float] = {}

    def __call__(self, run: Run, candidates: Sequence[ChangeSet]) -> list[list[float]]:
        if not self.saved_by:
            self.saved_by = dict(zip(candidates, self.saved_ms, strict=True))
        saved = accumulate((self.saved_by[each] for each in candidates), initial=0.0)
        return [
            [1e-3 * (1000 - ms + (number % 2) * noise) for noise in self.NOISE]
            for number, ms in enumerate(saved)
        ]


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), *(Slow() for _ in range(count)))


def planned(model: nn.Module, monkeypatch: pytest.MonkeyPatch, fix: Faster | None = None) -> tilefit.Plan:
    monkeypatch.setattr(planner, "require_cuda", lambda run: None)
    monkeypatch.setattr(registry, "all_fixes", lambda: (fix or Faster(),))
    inputs = torch.empty(2**20, 64, device="meta")
    return tilefit.optimize(model, inputs, gpu="h200", optimizer="none", verify=False, measure=True)


@pytest.mark.parametrize(
    ("saved_ms", "kept"),
    [
        ([500], [0]),
        ([1], [0]),
        ([-100], []),
        ([-1], []),  # perhaps it is no loss, but the plan is no gain
        ([500, -100], [0]),
        ([-100, 500], [1]),
        ([500, -1], [0, 1]),  # perhaps a loss, but the plan is a gain
        ([2, -3], [0]),
    ],
)
def test_what_was_measured_counts(
    saved_ms: list[float], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = Timer(saved_ms)
    monkeypatch.setattr(planner, "step_times_s", timer)
    model = layers(len(saved_ms))
    plan = planned(model, monkeypatch)
    everything = list(timer.saved_by)
    assert len(everything) == len(saved_ms)
    assert plan.candidates == tuple(everything[index] for index in kept)
    assert plan.provenance == "measured"
    assert plan.before_s == pytest.approx(1)
    assert plan.before_s - plan.after_s == pytest.approx(1e-3 * sum(saved_ms[index] for index in kept))
    assert kept or plan.after_bytes == plan.before_bytes
    assert "--" not in str(plan)
    for fix, index in zip(plan.fixes, kept, strict=True):
        assert fix.measured_s == pytest.approx(1e-3 * saved_ms[index])
    paths = {path for candidate in plan.candidates for path in candidate.modules}
    assert {path for path, layer in model.named_children() if behaviours(layer)} == paths
    dropped = [each for each in plan.refused if "measured" in each.reason]
    assert len(dropped) == len(saved_ms) - len(kept)
    for each in dropped:
        assert re.search(r"a step takes \d+(\.\d+)? ms longer with it", each.reason)


def test_what_needs_a_fix_that_is_taken_back_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer([-100, 500])

    class Needing(Change):
        def make(self, run: Run, edits: Edits) -> None:
            if timer.saved_by and not behaviours(run.model[1]):
                raise RefusedError("layer 1 is not changed")
            super().make(run, edits)

    class Both(Faster):
        def changes(self, context: Any) -> Iterator[ChangeSet]:
            if not behaviours(context.run.model[1]):
                yield Change(("1",), as_relu)
            elif not behaviours(context.run.model[2]):
                yield Needing(("2",), as_relu)

    monkeypatch.setattr(planner, "step_times_s", timer)
    model = layers(2)
    plan = planned(model, monkeypatch, Both())
    assert not plan.fixes
    assert not any(behaviours(layer) for layer in model)
    reasons = {each.modules: each.reason for each in plan.refused}
    assert "longer with it" in reasons["1",]
    assert "goes with a fix that was taken back (layer 1 is not changed)" in reasons["2",]


@pytest.mark.parametrize(("saved_ms", "kept"), [(20, True), (2, False), (-20, False)])
def test_what_cannot_be_predicted_stays_where_it_is_measured_to_gain(
    saved_ms: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    def planned(**options: bool) -> tilefit.Plan:
        image = torch.empty(4, 8, 9, 9, device="meta")
        return tilefit.optimize(nn.Conv2d(8, 8, 3), image, gpu="h200", select=["cudnn-autotuning"], **options)

    assert not planned().fixes
    monkeypatch.setattr(planner, "require_cuda", lambda run: None)
    monkeypatch.setattr(planner, "step_times_s", Timer([saved_ms]))
    plan = planned(measure=True)
    assert torch.backends.cudnn.benchmark == kept == bool(plan.fixes)
    assert kept or "measured" in plan.refused[0].reason
    assert kept == (plan.speedup > 1)
    plan.undo()
    assert not torch.backends.cudnn.benchmark
