"""Phases, recomputation, parameters' names and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from capturing import captured, entries, names, products, rows
from tilefit.capture import capture
from tilefit.errors import CaptureError
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, PHASES, Attention, Gemm, Memory, Step


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1, self.training)
        return x + torch.tanh(self.out(y.transpose(1, 2).flatten(2)))


class _Blocks(nn.Module):
    """Blocks that are checkpointed or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(_Block(64) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().sum()


def _step(reentrant: bool | None, amp: str = "") -> Step:
    return capture(_Blocks(reentrant), rows(2, 32, 64), amp=amp, optimizer="none")


@pytest.mark.parametrize("amp", ["", "bf16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_each_block_s_forward_again(reentrant: bool, amp: str) -> None:
    plain, again = _step(None, amp), _step(reentrant, amp)
    assert not any(entry.recomputed for entry in plain.ops)
    repeated = [entry for entry in again.ops if entry.recomputed]
    assert {entry.phase for entry in repeated} == {FORWARD}
    for kind, of_a_block in ((Gemm, 2), (Attention, 1), ("native_dropout", 1)):
        assert len(entries(again, kind, FORWARD)) - len(entries(plain, kind, FORWARD)) == 3 * of_a_block
        assert sum(entry in repeated for entry in entries(again, kind)) == 3 * of_a_block
        for phase in (BACKWARD_DATA, BACKWARD_WEIGHT):
            assert len(entries(again, kind, phase)) == len(entries(plain, kind, phase))
    # Repeated products run in the forward's element type, and say where they come from.
    assert {entry.op.dtype for entry in entries(again, Gemm)} == {amp or "fp32"}
    assert {entry.site.module for entry in repeated if isinstance(entry.op, Gemm)} == {
        f"blocks.{i}.{name}" for i in range(3) for name in ("qkv", "out")
    }


def test_a_checkpointed_function_without_modules_is_recomputed_too() -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.tanh(y @ self.linear.weight), x, use_reentrant=False)

    step = captured(run, rows(4, 16, requires_grad=True), parts={"linear": nn.Linear(16, 16)})
    assert [entry.recomputed for entry in entries(step, Gemm, FORWARD)] == [False, True]


def test_checkpointing_keeps_fewer_activations() -> None:
    plain, again = _step(None).memory, _step(False).memory
    assert again.saved_bytes < plain.saved_bytes / 3
    assert again.peak_bytes < plain.peak_bytes


def test_a_gradient_taken_within_the_forward_is_a_backward_pass() -> None:
    """As in force fields and gradient penalties."""

    def forces(self: Any, x: torch.Tensor) -> torch.Tensor:
        energy = torch.tanh(self.linear(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()

    step = captured(forces, rows(4, 16, requires_grad=True), parts={"linear": nn.Linear(16, 16)})
    assert not any(entry.recomputed for entry in step.ops)
    assert [phase for phase, *_ in products(step)][:2] == [FORWARD, BACKWARD_DATA]
    # Differentiated again, the first gradient's product has a data and a weight gradient of its own.
    assert sorted(products(step)) == [
        (BACKWARD_DATA, 4, 16, 16, "NN"),
        (BACKWARD_DATA, 4, 16, 16, "NN"),
        (BACKWARD_DATA, 4, 16, 16, "TN"),
        (BACKWARD_WEIGHT, 16, 16, 4, "NT"),
        (BACKWARD_WEIGHT, 16, 16, 4, "NT"),
        (FORWARD, 4, 16, 16, "TN"),
    ]


def test_phases_come_in_order() -> None:
    step = capture(_Blocks(None), rows(2, 32, 64), optimizer="adamw")
    order = [PHASES.index(entry.phase) for entry in step.ops]
    assert order[0] == 0
    assert order[-1] == len(PHASES) - 1
    assert [entry.phase == FORWARD for entry in step.ops].index(False) > 0


def test_the_memory_held_is_exact() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32))
    parameters = 4 * (64 * 32 + 2 * 32)
    buffers = 4 * 2 * 32 + 8
    adamw = capture(model, rows(8, 64), optimizer="adamw", fused_optimizer=True).memory
    sgd = capture(model, rows(8, 64), optimizer="sgd").memory
    for memory, state in ((adamw, 2 * parameters), (sgd, 0)):
        assert memory.parameter_bytes == memory.gradient_bytes == parameters
        assert memory.buffer_bytes == buffers
        assert memory.optimizer_bytes == state
        assert memory.fixed_bytes <= memory.peak_bytes < memory.fixed_bytes + 4 * 8 * 64 + 4 * 8 * 32 * 8


def test_the_state_of_an_optimizer_counts_once_at_the_peak() -> None:
    width = 512
    memory = capture(nn.Linear(width, width, bias=False), rows(1, width), optimizer="adamw").memory
    weight = 4 * width * width
    # Parameter, gradient, two moments, and the square root that the multi-tensor kernels put aside.
    assert memory.peak_bytes == pytest.approx(5 * weight, rel=0.02)


def test_frozen_parameters_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    step = capture(model, rows(4, 16), optimizer="adamw")
    assert step.memory.gradient_bytes == step.memory.parameter_bytes / 2
    assert step.memory.optimizer_bytes == step.memory.parameter_bytes
    assert [phase for phase, *_ in products(step)] == [FORWARD, FORWARD, BACKWARD_WEIGHT]
    assert {name: p.trainable for name, p in step.parameters.items()} == {
        "0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True,
    }  # fmt: skip


def test_inference_keeps_parameters_and_what_is_alive() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    memory = capture(model, rows(8, 64), train=False).memory
    parameters, activation = 4 * 4 * 64 * 64, 4 * 8 * 64
    assert memory == Memory(
        timeline=memory.timeline,
        parameter_bytes=parameters,
        saved_bytes=0,
        peak_bytes=parameters + 3 * activation,
        moments=((parameters, 3 * activation),),
    )


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("amp", ["", "bf16"])
def test_how_the_memory_grows_does_not_depend_on_the_batch_captured(amp: str, train: bool) -> None:
    """Autocast's copies of weights, gradients and the optimizer's temporaries stay as large as they are."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    captured_on = {n: capture(model, rows(n, 256), amp=amp, train=train).memory for n in (1, 2000)}
    capacity_bytes = 1 << 30
    fits = captured_on[1].largest_batch(1, capacity_bytes)
    assert fits == pytest.approx(captured_on[2000].largest_batch(2000, capacity_bytes), rel=0.01)
    assert capture(model, rows(fits, 256), amp=amp, train=train).memory.peak_bytes <= 1.01 * capacity_bytes
    assert captured_on[1].on_batch(2000).peak_bytes == pytest.approx(captured_on[2000].peak_bytes, rel=0.01)
    assert captured_on[2000].on_batch(1 / 2000).peak_bytes == pytest.approx(
        captured_on[1].peak_bytes, rel=0.01
    )


def test_an_activation_that_is_dropped_is_freed() -> None:
    def chain(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = x.exp()
        return x

    peak_bytes = captured(chain, rows(1024), train=False).memory.peak_bytes
    assert peak_bytes == 3 * 4 * 1024


def test_views_of_one_memory_have_one_number() -> None:
    step = captured(lambda self, x: (x.exp(), x.t().exp()), rows(8, 4), train=False)
    first, second = (entry.inputs[0] for entry in step.ops)
    assert first.id == second.id
    assert (first.shape, second.shape) == ((8, 4), (4, 8))


def test_a_step_survives_being_written_and_read() -> None:
    step = capture(_Blocks(False), rows(2, 32, 64), amp="fp16")
    assert Step.from_json(step.to_json()) == step


def test_two_captures_are_equal() -> None:
    assert names(_step(False)) == names(_step(False))
    assert _step(False) == _step(False)


def test_captures_share_what_layouts_lead_to_and_nothing_else() -> None:
    x = torch.empty(4, 6)

    def written(value: torch.Tensor) -> torch.Tensor:
        return value.mul(2).add_(1.0).unsqueeze_(0)

    def refused(value: torch.Tensor) -> torch.Tensor:
        return value.mul(2).add_(torch.empty(3, 1, device=value.device))

    class Called(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, value: torch.Tensor) -> Any:
            return self.function(value)

    def shapes(dtype: torch.dtype) -> list[Any]:
        step = capture(Called(written), x.to(dtype), train=False)
        return [(op.name, [(ref.shape, ref.dtype) for ref in op.outputs]) for op in step.ops]

    first, other = shapes(torch.float32), shapes(torch.bfloat16)
    assert first == shapes(torch.float32) != other == shapes(torch.bfloat16)
    for _ in range(2):
        with pytest.raises(CaptureError, match="broadcast"):
            capture(Called(refused), x, train=False)
    default, results = torch.get_default_dtype(), []
    for dtype in (default, torch.float64, default):
        torch.set_default_dtype(dtype)
        try:
            step = capture(Called(lambda value: value / 2), torch.ones(3, dtype=torch.int64), train=False)
        finally:
            torch.set_default_dtype(default)
        results.append(step.ops[-1].outputs[0].dtype)
    assert results == ["fp32", "fp64", "fp32"]
