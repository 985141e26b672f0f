"""Layers that a loop calls step by step, for all steps at once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import tilefit
from tilefit.fixes.behaviour import behaviours
from tilefit.fixes.fix import RefusedError
from tilefit.fixes.run import Run
from tilefit.fixes.time_steps import stepping

Take = Callable[[torch.Tensor], Iterable[torch.Tensor]]


class Recurrent(nn.Module):
    """A cell with normalisation, written by hand; ``take`` yields the steps of a sequence."""

    def __init__(self, take: Take, features: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.take = take
        self.ih, self.hh = nn.Linear(features, 2 * hidden), nn.Linear(hidden, 2 * hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, outputs = 0, []
        for step in self.take(x):
            gates = self.ih(step)
            gates += self.hh(h) if outputs else 0
            update, new = gates.chunk(2, -1)
            h = self.norm(torch.tanh(new)) * update.sigmoid() + h
            outputs.append(h)
        return torch.stack(outputs)


TAKES: dict[str, tuple[Take, tuple[int, ...]]] = {
    "time first": (lambda x: list(x), (9, 3, 6)),
    "indexed": (lambda x: (x[t] for t in range(len(x))), (9, 3, 6)),
    "batch first": (lambda x: (x[:, t] for t in range(x.shape[1])), (3, 9, 6)),
    "unbind": (lambda x: x.unbind(1), (3, 9, 6)),
    "transposed": (lambda x: x.transpose(0, 1).unbind(), (3, 9, 6)),
    "channels": (lambda x: x.transpose(1, 2).unbind(1), (3, 6, 9)),
    "images": (lambda x: x.unbind(2), (3, 4, 9, 6)),
    "one sample": (lambda x: x.unbind(1), (1, 9, 6)),
    "kept dimension": (lambda x: x.split(1, dim=1), (3, 9, 6)),
    "backwards": (lambda x: (x[t] for t in reversed(range(len(x)))), (9, 3, 6)),
}


def made(take: Take = TAKES["time first"][0]) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(take).double()


def stepped(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    stepping("ih").apply(Run(model))
    return model


def products(model: nn.Module, x: torch.Tensor) -> int:
    """How many products the input layer computes."""
    found = []

    class Recording(TorchFunctionMode):
        __module__ = "tilefit.tests"  # where others watch, layers run as they did

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                found.append(args[1].data_ptr() == model.ih.weight.data_ptr())
            return func(*args, **(kwargs or {}))

    with Recording():
        model(x)
    return sum(found)


@pytest.mark.parametrize("name", TAKES)
def test_one_product_the_same_function(name: str) -> None:
    take, shape = TAKES[name]
    original, x = made(take), torch.randn(shape, dtype=torch.double)
    model = stepped(original)
    assert products(original, x) == 9
    assert products(model, x) == 2
    result = tilefit.verify(original, model, x, steps=1)
    assert result.ok, result


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(20, 6), made(lambda x: x.unbind(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(self.table(tokens))


def test_gradients_reach_what_made_the_sequence() -> None:
    torch.manual_seed(0)
    original = Embedded().double()
    model = copy.deepcopy(original)
    stepping("inner.ih").apply(Run(model))
    result = tilefit.verify(original, model, torch.randint(0, 20, (3, 9)))
    assert result.ok, result


def detached(x: torch.Tensor) -> Iterable[torch.Tensor]:
    return x.detach().unbind()


def sometimes_detached(x: torch.Tensor) -> Iterable[torch.Tensor]:
    return (step.detach() if t % 2 else step for t, step in enumerate(x.unbind()))


def copied(x: torch.Tensor) -> Iterable[torch.Tensor]:
    return (step * 2 for step in x)


def written(x: torch.Tensor) -> Iterable[torch.Tensor]:
    x = x.clone()
    for t in range(len(x)):
        x[t] *= 2
        yield x[t]


def strided(x: torch.Tensor) -> Iterable[torch.Tensor]:
    return x[..., ::2].expand(3, *x[..., ::2].shape)[0].repeat_interleave(2, -1).unbind()


def twice(x: torch.Tensor) -> Iterable[torch.Tensor]:
    return [*x, *x]


def some(x: torch.Tensor) -> Iterable[torch.Tensor]:
    return x[2:5]


@pytest.mark.parametrize("take", [detached, sometimes_detached, copied, strided, twice, some])
def test_other_loops_do_what_they_did(take: Take) -> None:
    original, x = made(take), torch.randn(9, 3, 6, dtype=torch.double)
    result = tilefit.verify(original, stepped(original), x, steps=1)
    assert result.ok, result


def test_a_loop_that_writes_as_it_goes_computes_each_step_once() -> None:
    original, x = made(written), torch.randn(9, 3, 6, dtype=torch.double)
    model = stepped(original)
    with torch.no_grad():
        assert products(model, x) == 9
        torch.testing.assert_close(model(x), original(x))


def test_sequences_and_modes_change_from_call_to_call() -> None:
    original = made()
    model = stepped(original)
    for length in (9, 4, 9):
        x = torch.randn(length, 3, 6, dtype=torch.double)
        torch.testing.assert_close(model(x), original(x))
        with torch.no_grad():
            assert products(model, x) == 2
            torch.testing.assert_close(model(x), original(x))
        with torch.inference_mode():
            torch.testing.assert_close(model(x.clone()), original(x))
        for which in (original, model):
            which.ih.weight.data.mul_(1.1)


def test_copies_checkpoints_and_the_compiler() -> None:
    original, x = made(), torch.randn(9, 3, 6, dtype=torch.double)
    model = stepped(original)
    torch.testing.assert_close(copy.deepcopy(model)(x), original(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(model.ih))(x), original.ih(x))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), original(x))
    original.load_state_dict(model.state_dict())


def test_undo() -> None:
    model = made()
    edits = stepping("ih").apply(Run(model))
    edits.undo()
    assert not any(behaviours(each) for each in model.modules())


def plan(model: nn.Module, x: torch.Tensor) -> tilefit.Plan:
    return tilefit.optimize(model, x, gpu="h200", amp="bf16", select=["time-steps"])


def test_the_plan_finds_it() -> None:
    found = plan(Recurrent(TAKES["time first"][0], 64, 64), torch.empty(16, 32, 64))
    (fix,) = found.fixes
    assert fix.modules == ("ih",)  # not the product with the state
    assert fix.gain_s > 0.1 * found.before_s
    assert found.verification is not None
    assert found.verification.ok


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x:
            state = self.cell(step, state)
        return state[0]


def test_cells_are_refused() -> None:
    found = plan(Cell(), torch.empty(16, 8, 16))
    assert not found.fixes
    assert any("LSTMCell" in refused.reason for refused in found.refused)
    with pytest.raises(RefusedError):
        stepping("cell").apply(Run(Cell()))


def test_a_layer_that_is_called_once_is_left_alone() -> None:
    assert not plan(nn.Linear(64, 64), torch.empty(16, 32, 64)).fixes


def gradient_of_a_view(model: nn.Module, x: torch.Tensor) -> Any:
    x = x.requires_grad_()
    view = x.view_as(x)
    return torch.autograd.grad(model(view).square().sum(), view)


def hook_on_a_view(model: nn.Module, x: torch.Tensor) -> Any:
    x, seen = x.requires_grad_(), []
    view = x.view_as(x)
    view.register_hook(lambda gradient: seen.append(gradient) or gradient * 0.1)
    model(view).square().sum().backward()
    return x.grad, seen


def view_alone(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        view = (x.flatten(0, 1) * 2).view(x.shape)
    model(view.requires_grad_()).square().sum().backward()
    return view.grad


def hessian(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.autograd.functional.hessian(lambda each: model(each).square().sum(), x[:, :1])


def penalty(model: nn.Module, x: torch.Tensor) -> Any:
    x = x.requires_grad_()
    inputs = [x, *model.parameters()]
    first = torch.autograd.grad(model(x).square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), inputs)


def one_at_a_time(model: nn.Module, x: torch.Tensor) -> Any:
    x = x.requires_grad_()
    loss = model(x).square().sum()
    inputs = [x, model.ih.weight, model.ih.bias, model.hh.weight]
    return [torch.autograd.grad(loss, each, retain_graph=True) for each in (*inputs, inputs)]


def per_sample(model: nn.Module, x: torch.Tensor) -> Any:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x[:, None],)).square().sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 1))(weights, x)


@pytest.mark.parametrize("name", ["indexed", "unbind", "backwards"])
@pytest.mark.parametrize(
    "ask",
    [gradient_of_a_view, hook_on_a_view, view_alone, hessian, penalty, one_at_a_time, per_sample],
)
def test_derivatives(ask: Callable[[nn.Module, torch.Tensor], Any], name: str) -> None:
    take = TAKES["time first" if ask is per_sample and name == "unbind" else name][0]
    original = made(take)
    x = torch.randn(9, 9, 6, dtype=torch.double)[:, :3] if name != "unbind" else torch.randn(4, 5, 6).double()
    torch.testing.assert_close(ask(stepped(original), x.clone()), ask(original, x.clone()))


def test_autocast() -> None:
    original, x = made().float(), torch.randn(9, 3, 6)
    found = []
    for model in (original, stepped(original)):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().square().sum().backward()
        found.append((out, model.ih.weight.grad, model.ih.bias.grad))
    assert found[0][0].dtype == found[1][0].dtype
    for expected, other in zip(*found, strict=True):
        assert (expected - other).norm() < 0.03 * expected.norm()
