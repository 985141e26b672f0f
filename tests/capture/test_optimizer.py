"""Training steps that bring their own optimizer, scaler, scheduler and clipping."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    _device_dtype_check_for_fused,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from capturing import entries, names, products, rows
from tilefit.capture import capture
from tilefit.capture.autocast import constructible
from tilefit.capture.optimizer import _fuses_on_cuda, _require_fusible
from tilefit.errors import CaptureError, UsageError
from tilefit.ops import FORWARD, OPTIMIZER, PHASES, Step, Streaming

WEIGHTS = 64 * 32 + 32 + 32 * 10 + 10
BYTES = 4 * WEIGHTS


def _training(
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    *,
    fp16: bool = False,
    scheduled: bool = False,
    clipped: bool = False,
    logged: bool = False,
) -> Callable[..., Any]:
    """A training step as people write it."""
    with torch.device("meta"), constructible():
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = optimizer_of(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=fp16)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10) if scheduled else None
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.to(device), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16 if fp16 else torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        if logged:
            print(loss.item())
        return loss

    return step


def _captured(step: Callable[..., Any], **options: Any) -> Step:
    return capture(step, (rows(8, 64), torch.zeros(8, dtype=torch.int64)), **options)


def _optimizer_ops(step: Step) -> list[Any]:
    return [entry.op for entry in step.ops if entry.phase == OPTIMIZER]


OPTIMIZERS: list[tuple[str, Callable[[Any], torch.optim.Optimizer], int]] = [
    ("adam", lambda p: torch.optim.Adam(p), 2 * BYTES),
    ("adamw", lambda p: torch.optim.AdamW(p), 2 * BYTES),
    ("sgd", lambda p: torch.optim.SGD(p, lr=0.1), 0),
    ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), BYTES),
]


@pytest.mark.parametrize(("name", "optimizer", "state_bytes"), OPTIMIZERS)
def test_a_training_step_of_the_user_s_own(name: str, optimizer: Any, state_bytes: int) -> None:
    step = _captured(_training(optimizer))
    assert [phase for phase, *_ in products(step)] == [
        FORWARD, FORWARD, "backward-data", "backward-weight", "backward-weight",
    ]  # fmt: skip
    assert (step.settings.training, step.settings.optimizer, step.settings.amp) == (True, name, "bf16")
    assert step.memory.parameter_bytes == step.memory.gradient_bytes == BYTES
    assert step.memory.optimizer_bytes == state_bytes
    assert step.memory.peak_bytes >= step.memory.fixed_bytes
    assert set(step.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert step.batch == 8
    # Kept for the backward pass in bf16: the input, the second weight, the activation between them, the
    # log-probabilities; in fp32: their copy that the loss reads, the loss, its weight and its gradient.
    assert step.memory.saved_bytes == 2 * (8 * 64 + 32 * 10 + 8 * 32 + 8 * 10) + 4 * (8 * 10 + 3)
    # Multi-tensor kernels: each is one launch over all parameters.
    assert _optimizer_ops(step)
    assert {(op.elements, op.kernels, op.role) for op in _optimizer_ops(step)} == {(WEIGHTS, 1, "optimizer")}


def test_the_fused_optimizer_has_no_temporaries() -> None:
    model = nn.Linear(1024, 1024, bias=False, device="meta")
    peaks = []
    for fused in (True, False):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

        def step(x: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            return loss

        peaks.append(capture(step, {"x": torch.empty(8, 1024, device="meta")}).memory.peak_bytes)
    # Without it the root of the second moment lies beside weight, gradient and two moments.
    assert peaks[1] - peaks[0] == pytest.approx(4 * 1024**2, rel=0.05)


def test_the_fused_optimizer_is_one_kernel() -> None:
    step = _captured(_training(lambda p: torch.optim.AdamW(p, fused=True)))
    (op,) = _optimizer_ops(step)
    assert (op.read_bytes, op.write_bytes) == (4 * BYTES, 3 * BYTES)
    assert step.settings.fused_optimizer
    assert step.memory.optimizer_bytes == 2 * BYTES


def test_what_cuda_cannot_fuse_is_refused_as_there() -> None:
    table = nn.Embedding(64, 32, sparse=True)
    table(torch.zeros(8, dtype=torch.int64)).sum().backward()
    with pytest.raises(RuntimeError, match="fused SGD does not support sparse gradients"):
        _require_fusible(torch.optim.SGD(table.parameters(), fused=True))
    table.zero_grad(set_to_none=True)
    _require_fusible(torch.optim.SGD(table.parameters(), fused=True))


def test_a_class_that_is_fused_on_other_devices_alone_is_told_from_its_code() -> None:
    class Elsewhere(torch.optim.Optimizer):
        def _init_group(self, group: Any) -> None:
            _device_dtype_check_for_fused(group["params"][0], cuda_unsupported=True)

    assert _fuses_on_cuda(torch.optim.Adam)
    assert not _fuses_on_cuda(Elsewhere)


def test_one_kernel_for_each_tensor_if_the_user_asks_for_it() -> None:
    many = _optimizer_ops(_captured(_training(lambda p: torch.optim.Adam(p, foreach=False))))
    few = _optimizer_ops(_captured(_training(lambda p: torch.optim.Adam(p, foreach=True))))
    assert len(many) == 4 * len(few)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam, torch.optim.SGD])
def test_a_learning_rate_may_be_a_tensor(kind: Any) -> None:
    """Of those that can be captured, PyTorch then takes no multi-tensor path unless they are to be."""
    step = _captured(_training(lambda p: kind(p, lr=torch.tensor(0.1, device="cpu"))))
    few = _optimizer_ops(_captured(_training(lambda p: kind(p, lr=0.1))))
    assert (len(_optimizer_ops(step)) > len(few)) == (kind is not torch.optim.SGD)


def test_a_fused_optimizer_takes_its_learning_rate_as_a_tensor() -> None:
    step = _captured(
        _training(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1, device="cpu"), fused=True))
    )
    assert len(_optimizer_ops(step)) == 1


def test_a_scheduler_does_not_hide_the_optimizer() -> None:
    step = _captured(_training(lambda p: torch.optim.AdamW(p), scheduled=True))
    assert step.settings.optimizer == "adamw"
    assert _optimizer_ops(step) == _optimizer_ops(_captured(_training(lambda p: torch.optim.AdamW(p))))


@pytest.mark.parametrize("clipped", [True, False])
def test_the_scaler_unscales_once(clipped: bool) -> None:
    step = _captured(_training(lambda p: torch.optim.SGD(p, lr=0.1), fp16=True, clipped=clipped))
    (unscale,) = entries(step, "_amp_foreach_non_finite_check_and_unscale_", OPTIMIZER)
    assert (unscale.op.read_bytes, unscale.op.write_bytes) == (BYTES, BYTES)
    assert step.settings.amp == "fp16"
    # The loss is scaled before the backward pass.
    assert names(step)[-2:] == ["mul", "ones_like"]


def test_a_scaler_that_is_off_does_nothing() -> None:
    step = _captured(_training(lambda p: torch.optim.SGD(p, lr=0.1)))
    assert not entries(step, "_amp_foreach_non_finite_check_and_unscale_")
    assert "mul" not in names(step)


def test_clipping_takes_the_multi_tensor_path_in_the_optimizer_s_phase() -> None:
    step = _captured(_training(lambda p: torch.optim.SGD(p, lr=0.1), clipped=True))
    (norm,) = entries(step, "_foreach_norm")
    (scale,) = entries(step, "_foreach_mul_")
    assert (norm.phase, scale.phase) == (OPTIMIZER, OPTIMIZER)
    assert isinstance(scale.op, Streaming)
    assert scale.op.elements == WEIGHTS
    order = [PHASES.index(entry.phase) for entry in step.ops]
    assert order[-1] == PHASES.index(OPTIMIZER)


def test_two_steps_of_one_optimizer_have_one_state() -> None:
    once = _training(lambda p: torch.optim.AdamW(p))

    def twice(x: torch.Tensor, y: torch.Tensor) -> None:
        once(x, y)
        once(x, y)

    step = _captured(twice)
    assert step.memory.optimizer_bytes == 2 * BYTES
    assert len(_optimizer_ops(step)) == 2 * len(_optimizer_ops(_captured(once)))


def test_a_closure_is_not_the_optimizer_s_work() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    returned: list[Any] = []

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        returned.append(optimizer.step(closure))

    step = _captured(train)
    assert [phase for phase, *_ in products(step)] == [FORWARD, "backward-weight"]
    assert [entry.name for entry in step.ops if entry.phase == OPTIMIZER] == ["aten._foreach_add_"]
    assert returned[0].dim() == 0


def test_the_user_s_optimizer_is_as_before() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    capture(train, rows(8, 64))
    assert optimizer.param_groups[0]["fused"] is True
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def test_logging_the_loss_needs_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match="reads a tensor's value") as caught:
        _captured(_training(lambda p: torch.optim.AdamW(p), logged=True))
    assert "test_optimizer.py:" in caught.value.where
    assert "--on-cpu" in caught.value.hint
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.2f}")

    step = capture(train, (torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)), on_cpu=True)
    assert re.match(r"loss \d\.\d\d\n", capsys.readouterr().out)
    assert [phase for phase, *_ in products(step)] == [FORWARD, "backward-weight"]
    assert step.memory.optimizer_bytes == 2 * 4 * (64 * 10 + 10)


def test_step_counts_are_the_host_s_in_a_capture_with_real_data_too() -> None:
    on_shapes, real = (capture(nn.Linear(64, 10), rows(8, 64), on_cpu=on_cpu) for on_cpu in (False, True))
    assert [e.name for e in real.ops if e.phase == OPTIMIZER] == [
        e.name for e in on_shapes.ops if e.phase == OPTIMIZER
    ]


@pytest.mark.parametrize(("option", "word"), [({"optimizer": "adam2"}, "adamw"), ({"amp": "fp8"}, "bf16")])
def test_an_unknown_option_is_told_with_the_known_ones(option: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        capture(nn.Linear(4, 4), rows(2, 4), **option)
    assert word in caught.value.hint


def test_the_state_of_a_single_number_is_updated_with_all_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.6))
            self.linear = nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    def updates(model: nn.Module) -> list[str]:
        step = capture(model, torch.empty(8, 64, device="meta"), optimizer="adamw")
        return [entry.name for entry in step.ops if entry.phase == OPTIMIZER]

    with torch.device("meta"):
        assert updates(Scaled()) == updates(nn.Linear(64, 32))
