"""Replays: against fp32, against the joined batch, against a second run and a resumed one."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from precision.loops.parts import BF16, FP16, batch, mse, net, scaler
from tilefit.errors import UsageError
from tilefit.precision import check_accumulation, check_resume, compare, first_divergence


class _Careless(nn.Module):
    """Loses bits that its neighbours keep: it subtracts two large numbers in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return (h + 512) - 512


def _model(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), middle, nn.LayerNorm(16), nn.Linear(16, 4)
    )


@pytest.mark.parametrize(("dtype", "scale"), [(BF16, 1.0), (FP16, 1024.0)], ids=["bf16", "fp16"])
def test_a_layer_that_loses_precision_is_told_from_its_neighbours(dtype: torch.dtype, scale: float) -> None:
    x, y = batch(64)
    model = _model(_Careless())
    report = compare(model, lambda: mse(model, x, y, dtype), scale=scale)
    assert [(alarm.code, alarm.module) for alarm in report.findings] == [("AMP027", "3")]
    errors, operations = report.tables
    assert errors.rows[0][:2] == ("3", "output")
    assert {"0", "3.inner", "5"} <= {row[0] for row in errors.rows}
    assert "addmm" in {row[0] for row in operations.rows}


@pytest.mark.parametrize(("dtype", "scale"), [(BF16, 1.0), (FP16, 1024.0)], ids=["bf16", "fp16"])
def test_a_healthy_model_is_within_its_tolerances(dtype: torch.dtype, scale: float) -> None:
    x, y = batch(64)
    model = _model(nn.Linear(16, 16))
    report = compare(model, lambda: mse(model, x, y, dtype), scale=scale)
    assert report.findings == ()
    kinds = {row[1] for row in report.tables[0].rows}
    assert kinds == {"output", "weight gradient", "output gradient"}


def test_a_comparison_leaves_everything_as_it_was() -> None:
    x, y = batch()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
    mse(model, x, y, BF16).backward()
    gradients = [p.grad for p in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    compare(model, lambda: mse(model, x, y, BF16))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())


def test_a_comparison_needs_fp32_weights_and_half_precision_activations() -> None:
    x, y = batch()
    model = net()
    with pytest.raises(UsageError, match="nothing ran in half precision"):
        compare(model, lambda: nn.functional.mse_loss(model(x), y))
    half = net().bfloat16()
    with pytest.raises(UsageError, match="weights are in half precision"):
        compare(half, lambda: mse(half, x, y, BF16))


@pytest.mark.parametrize(("divisor", "projection"), [(1, 4.0), (16, 0.25), (4, None)])
def test_accumulation_is_judged_against_the_joined_batch(divisor: float, projection: float | None) -> None:
    model = net()
    x, y = batch(16)

    def accumulate() -> None:
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            (nn.functional.mse_loss(model(xs), ys) / divisor).backward()

    report = check_accumulation(model, accumulate, lambda: nn.functional.mse_loss(model(x), y))
    if projection is None:
        assert report.findings == ()
        return
    (alarm,) = report.findings
    assert (alarm.code, alarm.severity) == ("AMP018", "warning")
    assert f"{projection:g} times" in alarm.arithmetic[0]
    assert "test_replay.py" in alarm.source


def test_accumulation_by_token_counts_is_not_accused() -> None:
    model = net()
    x, y = batch(16)

    def accumulate() -> None:
        for xs, ys in zip(x.split([2, 6, 8]), y.split([2, 6, 8]), strict=True):
            (nn.functional.mse_loss(model(xs), ys, reduction="sum") / y.numel()).backward()

    assert check_accumulation(model, accumulate, lambda: nn.functional.mse_loss(model(x), y)).findings == ()


def test_accumulation_without_a_backward_pass_is_an_error() -> None:
    model = net()
    with pytest.raises(UsageError, match="no gradients"):
        check_accumulation(model, lambda: None, lambda: mse(model, *batch(), dtype=BF16))


def test_a_layer_with_a_state_of_its_own_is_where_runs_part() -> None:
    calls = count()

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1e-3 * next(calls)

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), Counting(), nn.Linear(8, 4))
    x, y = batch()
    (alarm,) = first_divergence(model, lambda: mse(model, x, y, BF16)).findings
    assert (alarm.code, alarm.module, alarm.severity) == ("AMP028", "2", "note")


def test_a_deterministic_model_does_not_part() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
    x, y = batch()
    assert first_divergence(model, lambda: mse(model, x, y, BF16)).findings == ()


def _resume(with_scaler: bool) -> Any:
    def build() -> Any:
        model = net()
        return model, Adam(model.parameters()), scaler(init_scale=2.0**20)

    def step(run: Any) -> Tensor:
        model, optimizer, s = run
        optimizer.zero_grad()
        loss = mse(model, *batch())
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()
        return loss

    def save(run: Any) -> Any:
        return [part.state_dict() for part in (run if with_scaler else run[:2])]

    def load(run: Any, saved: Any) -> None:
        for part, state in zip(run, saved, strict=False):
            part.load_state_dict(state)

    return check_resume(build, step, save, load)


def test_a_resumed_run_is_compared_bit_for_bit() -> None:
    assert _resume(with_scaler=True).findings == ()
    (alarm,) = _resume(with_scaler=False).findings
    assert (alarm.code, alarm.severity) == ("AMP020", "error")
