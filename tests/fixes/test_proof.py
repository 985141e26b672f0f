"""What a proof looks at, and on what."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilefit
from behaving import Change, as_relu, nothing, same
from tilefit.fixes import RefusedError, Run
from tilefit.fixes.changes.behaviour import behaviours
from tilefit.fixes.proof import likeness
from tilefit.fixes.proof.likeness import few_rows, with_values
from tilefit.fixes.proof.verification import prove, prove_in_place
from tilefit.options import Amp, StepOptions


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 257), nn.Linear(257, 128)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Blocks between a table and scores of a vocabulary; in evaluation it also returns features."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 128)
        self.blocks = nn.ModuleList(Mlp() for _ in range(blocks))
        self.head = nn.Linear(128, 50)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) if self.training else (self.head(x), self.blocks[0].up(x))


IDS = torch.randint(0, 50, (16, 512))
UP = Change(("blocks.0.up", "blocks.1.up"), same)


def run(device: str = "cpu", blocks: int = 2) -> Run:
    return Run(Model(blocks).to(device), IDS.to(device))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models are too large to be compared themselves."""
    monkeypatch.setattr(likeness, "FEW_PARAMETERS", 100_000)


# ---- scenarios: each finds what no other does -------------------------------------------------


def other_width(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
    return forward(F.pad(x, (0, module.in_features - x.shape[-1])))


class Kept:
    """Of what a call computed, something is kept."""

    def __init__(self, by: str) -> None:
        self.by, self.known = by, {}

    def __call__(self, module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        key = x.data_ptr() if self.by == "memory" else tuple(x.flatten().tolist())
        if torch.is_grad_enabled():
            return forward(x)
        return self.known.setdefault((id(module), key), forward(x))


def zero_gradients(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
    """A sibling gets zeros where it had no gradient."""
    others = sum(p.sum() for p in module.__dict__.get("others", ()))
    return forward(x) + 0 * others if module.__dict__.get("others") else forward(x)


class Cut(torch.autograd.Function):
    """No second derivative, and nobody is told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.detach() * x.detach().cos()


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def of_detached_view(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
    return forward(x if x._base is None else x.detach().requires_grad_(x.requires_grad))


class Counted:
    """Off from the third call of each copy on, in training."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def __call__(self, module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls[id(module)] = self.calls.get(id(module), 0) + 1
        return forward(x) * (1.001 if module.training and self.calls[id(module)] > 2 else 1.0)


WRONG: list[tuple[str, Any]] = [
    ("eval", nothing),
    ("train", lambda m, forward, x: forward(x) * (1 + 1e-6 * m.training)),
    ("optimizer steps", Counted()),
    ("called again", Kept("memory")),
    ("called again", Kept("value")),
    ("inputs that are views", of_detached_view),
    ("a batch of another size", lambda m, forward, x: forward(x) * (1 if x.shape[0] == 2 else 1.001)),
    ("parts given wrong sizes", other_width),
    ("hooks set afterwards", lambda m, forward, x: forward(x) + (1e-3 if m._forward_hooks else 0.0)),
    ("a sample of NaN", lambda m, forward, x: forward(x.nan_to_num())),
    (
        "in its own precision",
        lambda m, forward, x: forward(x).double() if x.dtype == torch.float32 else forward(x),
    ),
    ("huge and tiny numbers", lambda m, forward, x: forward(x) + (x / 1e30 * 1e9 * 1e30 * 0).to(x.dtype)),
]


@pytest.mark.parametrize(("scenario", "does"), WRONG)
def test_a_scenario_finds_what_is_wrong_in_it_alone(scenario: str, does: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    found = prove(Run(model, torch.randn(8, 6)), [Change(("0",), does)])
    assert not found.ok
    assert found.differences[0].what.startswith(f"{scenario}:"), found
    assert scenario in str(found)


def test_second_derivatives_that_vanish() -> None:
    change = Change(("1",), lambda m, forward, x: Cut.apply(x))
    found = prove(Run(nn.Sequential(nn.Linear(6, 6), Sine(), nn.Linear(6, 6)), torch.randn(8, 6)), [change])
    assert found.differences[0].what.startswith("second derivatives")


def test_a_part_that_is_called_by_itself() -> None:
    """What the model never shows, somebody who calls a part of it sees."""

    def widened(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        return F.pad(forward(x), (0, 7))

    def narrowed(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(x[..., : module.in_features])

    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
    found = prove(Run(model, torch.randn(8, 6)), [Change(("0",), widened), Change(("2",), narrowed)])
    assert found.differences[0].what == "parts called by themselves: 0"


def test_zeros_are_no_gradient_that_is_none() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.a.__dict__["other"] = self.b

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    def reaching(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(x) + 0 * module.__dict__["other"].weight.sum()

    found = prove(Run(Heads(), torch.randn(8, 6)), [Change(("a",), reaching)])
    assert found.differences[0].what.startswith("parts called by themselves: gradient of b.weight")


def test_what_is_the_same_is_proven_in_all_of_them() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 6))
    found = prove(Run(model, torch.randn(8, 6)), [Change(("0", "3"), same), Change(("1",), as_relu)])
    assert found.ok, found
    assert found.compared >= 90


# ---- likenesses --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_large_model_is_proven_on_a_small_one_like_it(device: str, small: None) -> None:
    before = run(device, blocks=12)
    change = Change(tuple(f"blocks.{i}.up" for i in range(12)), same)
    found = prove(before, [change])
    assert found.ok, found
    assert found.scope.startswith("a model like it")
    small_one = likeness.likeness(before, [change])
    assert small_one.changes[0].modules == ("blocks.0.up", "blocks.1.up")
    assert small_one.run.model.blocks[1].up.out_features % 8 == 257 % 8
    assert not prove(before, [replace(change, does=lambda m, forward, x: forward(x) * 1.001)]).ok


def test_evaluation_of_a_large_model_is_seen_too(small: None) -> None:
    """Its features are returned in evaluation alone."""

    def widened(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        return F.pad(forward(x), (0, 7))

    def narrowed(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(x[..., : module.in_features])

    changes = [
        Change((f"blocks.{i}.{name}",), does)
        for i in range(2)
        for name, does in (("up", widened), ("down", narrowed))
    ]
    assert prove(run(), changes).differences[0].what.startswith("eval: output[1]")


def test_a_large_model_that_has_no_likeness_is_refused(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "_smaller_ones", lambda whole: iter(()))
    monkeypatch.setattr(likeness, "MOST_PARAMETERS", 0)
    with pytest.raises(RefusedError, match="too many to be compared"):
        prove(run(), [UP])


@pytest.mark.parametrize("size", [64, 255, 500, 768, 1000, 1007, 2049, 4095, 50257])
@pytest.mark.parametrize("factor", [1, 2, 4, 8, 16])
def test_smaller_sizes_are_as_odd_and_in_the_same_order(size: int, factor: int) -> None:
    small = likeness._smaller(size, factor)
    assert 0 < small <= size
    assert small % 8 == size % 8
    padded = -(-size // 8) * 8
    assert (likeness._smaller(padded, factor) > small) == (padded > size)


def test_changes_work_on_few_rows_in_a_comparison() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Rowed(Change):
        least_rows: int

    assert few_rows(Rowed(("a",), same, 1000)) == Rowed(("a",), same, 0)


# ---- the model stays, and the inputs -----------------------------------------------------------


def test_the_model_and_the_random_numbers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    before = run()
    state = copy.deepcopy(before.model.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    assert prove(before, [UP]).ok
    assert torch.equal(torch.rand(1), expected)
    assert not seeded  # nor are those of GPUs others
    assert not any(map(behaviours, before.model.modules()))
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, state[name])


class Fixed(nn.Module):
    """Takes sequences of one length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(-1, 10, 3))


def test_inputs_are_cut_only_as_far_as_the_model_takes_it() -> None:
    change = Change(("layer",), same)
    assert prove(Run(Fixed(), torch.randn(64, 10, 3)), [change]).ok
    with pytest.raises(RefusedError, match="does not run"):
        prove(Run(Fixed(), torch.randn(64, 7, 3)), [change])


def test_zeros_are_no_values() -> None:
    """A bias that is zero everywhere, and an input of zeros, would hide a mistake."""
    before = replace(run(), options=StepOptions(train=False))
    nn.init.zeros_(before.model.head.bias)
    forgetting = Change(("head",), lambda m, forward, x: F.linear(x, m.weight) + 0 * m.bias)
    assert not prove(before, [forgetting]).ok


class Half(nn.Module):
    """Its forward pass works in half precision alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and x.dtype != torch.float16:
            raise TypeError("half precision, please")
        return self.layer(x)


def test_a_model_that_raises_in_the_comparison_is_left_alone() -> None:
    for proof_of in (prove, prove_in_place):
        with pytest.raises(RefusedError, match="raised TypeError: half precision"):
            proof_of(Run(Half(), torch.randn(8, 3)), [Change(("layer",), same)])


def test_where_it_is_without_inputs_that_have_values() -> None:
    assert prove_in_place(replace(run(), inputs=IDS.to("meta")), [UP]).ok


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_where_it_is_and_in_its_own_precision(amp: Amp) -> None:
    before = replace(run(), options=StepOptions(amp=amp))
    before.model.head.bias.grad = torch.ones(50)
    state = copy.deepcopy(before.model.state_dict())
    good = prove_in_place(before, [UP])
    assert good.ok, good
    assert good.dtype == ("float32" if amp == "off" else "bfloat16")
    assert not any(map(behaviours, before.model.modules()))
    assert torch.equal(before.model.head.bias.grad, torch.ones(50))
    assert before.model.head.weight.grad is None
    assert before.model.training
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, state[name])
    off = Change(("head",), lambda m, forward, x: forward(x) * 1.2)
    assert not prove_in_place(before, [off]).ok


@pytest.mark.parametrize("left_over", [float("nan"), float("inf"), 3e38, 1e-42])
def test_what_lay_in_memory_is_no_input(left_over: float) -> None:
    """``torch.empty`` gives a shape; what it holds must not decide whether a fix is proven."""
    x = torch.zeros(4, 3)
    x[0] = torch.tensor([left_over, left_over / 2, left_over / 4])
    x[1, 0] = left_over / 8 if left_over < 1 else 1.0
    found = with_values((x, torch.arange(6.0)), nn.Linear(3, 3))
    assert found[0].isfinite().all()
    assert 0.1 < found[0].abs().max() < 10
    assert found[1].equal(torch.arange(6.0))


@pytest.mark.parametrize("left_over", [float("nan"), float("inf"), 1e30, 1e8, 1e-40])
@pytest.mark.parametrize("places", [1, 5])
def test_a_fix_is_proven_on_inputs_of_any_size(left_over: float, places: int) -> None:
    """Attention magnifies rounding errors of large inputs without end."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 21), nn.Linear(21, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.mT).softmax(-1) @ self.down(F.gelu(self.up(x)))

    def elsewhere(module: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        """The same, rounded otherwise."""
        a, b = module.weight.split([9, 12], 1)
        return F.linear(x[..., :9], a) + F.linear(x[..., 9:], b) + module.bias

    x = torch.zeros(4, 8, 16)
    x.view(-1)[:places] = left_over * torch.arange(1, places + 1)
    for inputs in (x, torch.randn(4, 8, 16) * left_over):
        found = prove(Run(Mixed(), inputs), [Change(("down",), elsewhere)])
        assert found.ok or "parts given wrong sizes" in str(found)


def test_large_inputs_are_made_smaller_and_keep_their_signs() -> None:
    x = torch.tensor([-30000.0, 0.0, 15.0])
    assert with_values(x, nn.Linear(3, 3)).equal(torch.tensor([-10.0, 0.0, 0.005]))


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_masks_keep_their_values(hidden: float) -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), hidden)
    assert with_values({"x": mask}, nn.Linear(3, 3))["x"].equal(mask)


def test_a_plan_says_on_what_it_was_proven() -> None:
    plan = tilefit.optimize(nn.Linear(8, 8), torch.randn(4, 8), gpu="h200", min_gain=1.0)
    assert plan.verification is None
