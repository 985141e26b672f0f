"""Merged projections: one product, the same layers."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import tilefit
from tilefit.fixes.changes.behaviour import behaviours
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.projections import Merging
from tilefit.ops import OPTIMIZER
from tilefit.options import StepOptions


class Attention(nn.Module):
    """Grouped-query attention with a key projection without bias."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // 2, bias=False)
        self.v = nn.Linear(width, width // 2)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        q = self.q(x)
        q *= 0.5
        k, v = (layer(memory).repeat_interleave(2, -1) for layer in (self.k, self.v))
        return self.out((q @ k.mT).softmax(-1) @ v)


def made() -> nn.Module:
    torch.manual_seed(0)
    return Attention().double()


def merged(model: nn.Module, least_rows: int = 0, names: tuple[str, ...] = ("q", "k", "v")) -> nn.Module:
    model = copy.deepcopy(model)
    Merging.of((names,), least_rows).apply(Run(model))
    return model


def products(model: nn.Module, *args: Any) -> list[int]:
    """How many outputs each product has."""
    found = []

    class Recording(TorchFunctionMode):
        __module__ = "tilefit.tests"  # where others watch, layers run as they did

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                found.append(args[1].shape[0])
            return func(*args, **(kwargs or {}))

    with Recording():
        model(*args)
    return found


X = torch.randn(3, 5, 16, dtype=torch.double)


def test_one_product_the_same_function() -> None:
    original = made()
    model = merged(original)
    assert products(model, X) == [32, 16]
    result = tilefit.verify(original, model, X, steps=1)
    assert result.ok, result


def test_another_input_is_another_product() -> None:
    original, memory = made(), torch.randn(3, 7, 16, dtype=torch.double)
    model = merged(original)
    result = tilefit.verify(original, model, (X, memory), steps=1)
    assert result.ok, result
    assert products(merged(original, names=("k", "v")), X, memory) == [16, 16, 16]


def test_an_input_that_was_written_to_in_between() -> None:
    original = made()
    model = merged(original)
    outputs = []
    for which in (original, model):
        x = X.clone()
        first = which.q(x)
        x.mul_(2)
        outputs.append((first, which.k(x), which.v(x)))
    torch.testing.assert_close(outputs[0], outputs[1])


def test_an_input_that_got_other_memory_in_between() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q = self.q(x)
            x.data = 2 * x
            return q, self.k(x), self.v(x)

    model = Replacing().double()
    x = torch.randn(4, 8, dtype=torch.double)
    with torch.no_grad():
        expected, found = (each(x.clone()) for each in (model, merged(model)))
    torch.testing.assert_close(found, expected)


def test_calls_of_one_layer_alone() -> None:
    original = made()
    model = merged(original)
    for name in "qqvkkq":
        torch.testing.assert_close(model.get_submodule(name)(X), original.get_submodule(name)(X))
    with torch.no_grad():
        quiet = model.q(X)
    assert model.k(X).requires_grad
    assert not quiet.requires_grad


def test_few_rows_and_inference_mode() -> None:
    model = merged(made(), least_rows=15)
    assert products(model, X) == [32, 16]
    assert products(model, X[:2]) == [16, 8, 8, 16]
    with torch.inference_mode():
        assert products(model, X.clone()) == [16, 8, 8, 16]


def test_autocast() -> None:
    original = made().float()
    model = merged(original)
    x = X.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = original(x), model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    for out in (expected, found):
        out.float().sum().backward()
    for p, q in zip(original.parameters(), model.parameters(), strict=True):
        assert q.grad.dtype == q.dtype
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05)


def test_copies_checkpoints_and_the_compiler() -> None:
    original = made()
    model = merged(original)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert products(other, X) == [32, 16]
        other.v.weight.data.zero_()
        other.v.bias.data.zero_()
        torch.testing.assert_close(other(X), other.out.bias.expand(3, 5, 16))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(X), original(X))
    assert model.state_dict().keys() == original.state_dict().keys()
    original.load_state_dict(model.state_dict())


def test_nothing_is_kept_after_a_call() -> None:
    model = merged(made())
    x = X.clone()
    alive = weakref.ref(x)
    model(x)
    del x
    gc.collect()
    assert alive() is None


def test_undo() -> None:
    model = made()
    edits = Merging.of((("q", "k"),), 0).apply(Run(model))
    assert behaviours(model.q)
    edits.undo()
    assert not any(behaviours(each) for each in model.modules())


def test_a_layer_that_is_no_plain_linear_is_refused() -> None:
    model = made()
    nn.utils.parametrizations.weight_norm(model.k)
    with pytest.raises(RefusedError, match="parametri"):
        merged(model)
    assert type(model.q) is nn.Linear


def plan(model: nn.Module, x: torch.Tensor, **options: Any) -> tilefit.Plan:
    return tilefit.optimize(model, x, gpu="h200", select=["merge-projections"], **options)


def test_the_plan_merges_what_pays() -> None:
    model = nn.Sequential(*(Attention(512) for _ in range(2)))
    found = plan(model, torch.empty(64, 256, 512), amp="bf16")
    (fix,) = found.fixes
    assert fix.modules == ("0.q", "0.k", "0.v", "1.q", "1.k", "1.v")
    assert fix.gain_s > 0
    assert found.verification is not None
    assert found.verification.ok


class Relative(Attention):
    """Of positions it asks only for queries and keys."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        positions = x.roll(1, 0)
        return super().forward(x) + self.q(positions).mean() + self.k(positions).mean()


def test_a_layer_that_is_also_called_without_its_siblings_is_left_alone() -> None:
    found = plan(Relative(512), torch.empty(64, 256, 512), amp="bf16")
    assert not found.fixes
    assert {refused.reason for refused in found.refused} == {"q is also called without the others"}


@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizer_sees_the_parameters_that_are_there(fused: bool) -> None:
    run = Run(
        made(), torch.empty(2, 5, 16, dtype=torch.float64), StepOptions(fused_optimizer=fused)
    ).on_meta()

    def work() -> list[Any]:
        return [(entry.name, entry.op) for entry in run.capture().ops if entry.phase == OPTIMIZER]

    before = work()
    Merging.of((("q", "k", "v"),), 1).apply(run)
    assert any(entry.name == "aten.cat" for entry in run.capture().ops)
    assert work() == before != []


def test_stacking_weights_needs_rows_to_pay() -> None:
    wide = Attention(4096).bfloat16().eval()
    assert not plan(wide, torch.empty(1, 1, 4096, dtype=torch.bfloat16), train=False).fixes
    plan(wide, torch.empty(8, 512, 4096), amp="bf16", verify=False, min_gain=-1.0)
    assert behaviours(wide.q)[0].least_rows > 8


class Heads(nn.Module):
    """Heads of which a call may ask for one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, size) for size in (3, 4, 5))

    def forward(self, x: torch.Tensor, *names: str) -> list[torch.Tensor]:
        return [self.get_submodule(name)(x) for name in names or "abc"]


def heads() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    original = Heads().double()
    return original, merged(original, names=("a", "b", "c"))


@pytest.mark.parametrize("names", ["a", "ca", "aab", "abc"])
def test_heads_that_are_not_called_get_no_gradient(names: str) -> None:
    for model in (pair := heads()):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            sum(out.square().sum() for out in model(X, *names)).backward()
            optimizer.step()
    original, model = pair
    for p, q in zip(original.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        torch.testing.assert_close(p, q)


def test_an_output_that_nothing_depends_on_has_no_gradient() -> None:
    for model in heads():
        model(X)[1].sum().backward()
        assert model.a.weight.grad is None
        assert model.b.weight.grad is not None


def test_new_weights_count() -> None:
    original, model = heads()
    state = {name: value * 3 for name, value in original.state_dict().items()}
    with torch.no_grad():
        for each in (original, model):
            each(X, "a")
            each.load_state_dict(state)
        torch.testing.assert_close(model(X, "b"), original(X, "b"))


def test_weights_that_change_within_a_call() -> None:
    class Scaling(Heads):
        def forward(self, x: torch.Tensor, *names: str) -> list[torch.Tensor]:
            first = self.a(x)
            with torch.no_grad():
                self.b.weight.mul_(2)
                self.c.weight.data = self.c.weight * 3
            return [first, self.b(x), self.c(x)]

    original = Scaling().double()
    model = merged(original, names=("a", "b", "c"))
    with torch.no_grad():
        torch.testing.assert_close(model(X), original(X))


@pytest.mark.parametrize("names", ["abc", "ab"])
def test_second_derivatives(names: str) -> None:
    found = []
    for model in heads():
        parameters = [p for name in names for p in model.get_submodule(name).parameters()]
        x = X.clone().requires_grad_()
        loss = sum(out.tanh().square().sum() for out in model(x, *names))
        first = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *parameters])
        found.append((first, second))
    torch.testing.assert_close(*found)


def test_transforms() -> None:
    found = []
    for model in heads():
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights: Any, x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return sum(y.square().sum() for y in torch.func.functional_call(model, weights, (x,)))

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X)
        found.append((gradients, torch.func.jvp(partial(loss, weights), (X,), (X,))))
    torch.testing.assert_close(*found)


def test_activation_checkpointing() -> None:
    class Inside(Attention):
        def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    for kind in (Inside, Attention):
        found = []
        original = kind().double()
        for model in (original, merged(original)):
            x = X.clone().requires_grad_()
            out = checkpoint(model, x, use_reentrant=False) if kind is Attention else model(x)
            out.square().sum().backward()
            found.append((out, x.grad, model.k.weight.grad))
        torch.testing.assert_close(*found)


def test_threads() -> None:
    original, model = heads()
    wrong: list[int] = []

    def work(number: int) -> None:
        x = torch.full((4, 16), float(number), dtype=torch.double)
        with torch.no_grad():
            expected = original(x)
            for _ in range(200):
                if not all(map(torch.equal, model(x.clone()), expected)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def doubled(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(2)


def test_layers_that_are_watched_are_called_by_themselves() -> None:
    original, model = heads()
    for each in (original, model):
        each.b.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        each.c.weight.register_post_accumulate_grad_hook(doubled)
        sum(out.sum() for out in each(X)).backward()
    torch.testing.assert_close(model(X), original(X))
    for p, q in zip(original.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
