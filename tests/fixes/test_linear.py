"""Padded linear layers do what the layers did."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import tilefit
from fixing import fixed
from tilefit.fixes import Plan
from tilefit.fixes.changes.behaviour import behaves, behaviours
from tilefit.fixes.kinds.padding.layers import Fitted

pytestmark = pytest.mark.usefixtures("any_size")
LARGE = torch.empty(8192, 13, device="meta")


def odd() -> nn.Sequential:
    return nn.Sequential(nn.Linear(13, 21), nn.Tanh(), nn.Linear(21, 7, bias=False))


def padded(model: nn.Module, inputs: Any = LARGE) -> nn.Module:
    """A copy of the model with padded layers, planned in fp32 under autocast."""
    dtype = next(model.parameters()).dtype
    changed = fixed(copy.deepcopy(model).float(), inputs, select=["pad-linear"]).model
    assert any(behaves(module, Fitted) for module in changed.modules())
    return changed.to(dtype)


class _Products(TorchFunctionMode):
    """Notes the sizes of what linear layers multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.sizes.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def features_seen(model: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """(out_features, in_features) of the products of a call."""
    with _Products() as products:
        model(x)
    return products.sizes


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def outcome(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of the input and all parameters."""
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def test_parameters_keep_names_shapes_and_values() -> None:
    model = odd()
    changed = padded(model)
    assert {n: p.shape for n, p in changed.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    changed.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(changed.state_dict(), strict=True)


@pytest.mark.parametrize("shape", [(5, 13), (3, 4, 13), (13,), (0, 13)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    model = odd().double()
    x = torch.randn(shape, dtype=torch.double)
    for a, b in zip(outcome(model, x), outcome(padded(model), x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_under_autocast_the_result_is_the_same_to_the_bit() -> None:
    model, x = odd(), torch.randn(64, 13)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = model(x), padded(model)(x)
    assert b.dtype == a.dtype == torch.bfloat16
    assert torch.equal(a, b)


def test_in_half_precision_without_autocast() -> None:
    model, x = odd().bfloat16(), torch.randn(64, 13, dtype=torch.bfloat16)
    for a, b in zip(outcome(model, x), outcome(padded(model), x), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a)


def test_a_result_may_be_changed_in_place() -> None:
    model = nn.Sequential(
        nn.Linear(13, 21), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(21, 8)
    ).double()
    x = torch.randn(5, 13, dtype=torch.double)
    for a, b in zip(outcome(model, x), outcome(padded(model), x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_second_derivatives() -> None:
    changed = padded(odd().double())
    x = torch.randn(3, 13, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(changed, (x,))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    model, x = odd().double(), torch.randn(5, 13, dtype=torch.double)

    def loss(of: nn.Module) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        checkpoint(of, inputs, use_reentrant=reentrant).square().sum().backward()
        return inputs.grad

    torch.testing.assert_close(loss(padded(model)), loss(model), rtol=1e-12, atol=1e-12)


def test_deep_copies_and_pickles_stay_padded() -> None:
    changed = padded(odd())
    x = torch.randn(5, 13)
    file = io.BytesIO()
    torch.save(changed, file)
    file.seek(0)
    for other in (copy.deepcopy(changed), torch.load(file, weights_only=False)):
        assert behaves(other[0], Fitted)
        assert torch.equal(other(x), changed(x))


def test_the_compiler_sees_one_graph() -> None:
    model, x = odd(), torch.randn(5, 13)
    compiled = torch.compile(padded(model), backend="aot_eager", fullgraph=True)
    for a, b in zip(outcome(model, x), outcome(compiled, x), strict=True):
        torch.testing.assert_close(b, a)


def test_frozen_parameters_stay_without_gradients() -> None:
    model = odd()
    model[0].weight.requires_grad_(False)
    changed = padded(model)
    changed(torch.randn(5, 13)).sum().backward()
    assert changed[0].weight.grad is None
    assert changed[0].bias.grad is not None


def test_hooks_see_the_layer_as_it_was() -> None:
    model = odd()
    seen: list[tuple[torch.Size, torch.Size]] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append((args[0].shape, output.shape)))
    changed = padded(model)
    changed(torch.randn(5, 13))
    assert seen[-1] == ((5, 13), (5, 21))


def test_few_rows_run_as_they_did() -> None:
    x = torch.empty(131072, 4095, device="meta")
    layer = tilefit.optimize(nn.Linear(4095, 4095), x, gpu="h200", amp="bf16", select=["ALN"]).model
    (padding,) = behaviours(layer)
    assert isinstance(padding, Fitted)
    assert 1 < padding.least_rows < 131072
    assert features_seen(layer, torch.randn(1, 4095)) == [(4095, 4095)]
    assert features_seen(layer, torch.randn(padding.least_rows, 4095)) == [(4096, 4096)]


def test_undo_leaves_no_trace() -> None:
    model = odd()
    before = [(type(m), dict(vars(m))) for m in model.modules()]
    plan = tilefit.optimize(model, LARGE, gpu="h200", amp="bf16", select=["ALN"], min_gain=-1e9)
    assert plan.model is model
    assert plan.fixes
    assert behaves(model[0], Fitted)
    plan.undo()
    assert [(type(m), dict(vars(m))) for m in model.modules()] == before
    assert plan.speedup == 1.0


# ---- what is between them ----------------------------------------------------------------------


class Gated(nn.Module):
    """A SwiGLU layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 21), nn.Linear(16, 21), nn.Linear(21, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Leaking(Gated):
    """What is between the layers is also seen by a reduction."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self.gate(x))
        return self.down(h) + h.mean()


class Normed(Gated):
    """A batch norm, which takes more dimensions than the features, too."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(length or 21)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.gate(x))))


@pytest.mark.parametrize("build", [Gated, Leaking, Normed])
def test_what_is_between_them_sees_what_it_saw(build: Callable[[], nn.Module]) -> None:
    model = build().double()
    changed = padded(model, torch.empty(8192, 16, device="meta"))
    x = torch.randn(5, 16, dtype=torch.double)
    assert set(features_seen(copy.deepcopy(changed), x)) == {(64, 16), (16, 64)}  # which a norm would count
    result = tilefit.verify(model, changed, x)
    assert result.ok, result


@pytest.mark.parametrize("length", [7, 21, 24])
def test_a_norm_over_another_dimension_than_the_padded_one(length: int) -> None:
    """21 features are padded to 24: where the norm has as many, these are not the features."""
    model = Normed(length).double()
    changed = padded(model, torch.empty(8192, length, 16, device="meta"))
    assert tilefit.verify(model, changed, torch.randn(5, length, 16, dtype=torch.double)).ok


class Adapted(nn.Module):
    """A frozen layer with a product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(13, 21).requires_grad_(False)
        self.a, self.b = nn.Linear(13, 4, bias=False), nn.Linear(4, 21, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 0.5 * self.b(self.a(x))


def test_an_adapted_layer() -> None:
    model = nn.Sequential(Adapted(), nn.ReLU(), nn.Linear(21, 8))
    changed = padded(model)
    assert behaves(changed[0].base_layer, Fitted)
    assert tilefit.verify(model, changed, torch.randn(5, 13)).ok
    assert changed[0].base_layer.weight.grad is None
    with torch.no_grad():  # merged into the layer
        for each in (model, changed):
            each[0].base_layer.weight.data += 0.5 * each[0].b.weight @ each[0].a.weight
    assert tilefit.verify(model, changed, torch.randn(5, 13)).ok


# ---- what is refused ---------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class ByHand(nn.Module):
    """Multiplies with a layer's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(13, 21)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layer.weight)


def parametrised() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(13, 21))


def patched() -> nn.Module:
    layer = nn.Linear(13, 21)
    layer.forward = MethodType(nn.Linear.forward, layer)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: OwnLinear(13, 21), "is a .*OwnLinear"),
        (ByHand, "is a .*ByHand"),
        (parametrised, "0 has parametrisations"),
        (patched, "forward method of .* was replaced"),
    ],
)
def test_refusals_say_why(build: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(build())
    plan: Plan = tilefit.optimize(model, LARGE, gpu="h200", amp="bf16", select=["ALN"], min_gain=-1e9)
    assert not plan.fixes
    assert any(re.search(reason, refused.reason) for refused in plan.refused)
