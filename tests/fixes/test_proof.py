"""How a candidate is proven on models of any size."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilefit
from tilefit.fixes import ChangeSet, RefusedError, Run, Undo, proof
from tilefit.fixes.linear import PaddedLayer, PaddedLinear, Padding
from tilefit.fixes.proof import _with_values, prove, prove_in_place
from tilefit.options import Amp, StepOptions


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 21), nn.Linear(21, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def layer(path: str, old: tuple[int, int], keeps: bool = False) -> PaddedLayer:
    wide = tuple(-(-size // 8) * 8 for size in old)
    return PaddedLayer(path, old, (wide[0], wide[1]), 1000, keeps)


BLOCKS = tuple(f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down"))
CHAIN = Padding(
    BLOCKS,
    tuple(layer(p, (21, 16), True) if p.endswith("up") else layer(p, (16, 21)) for p in BLOCKS),
    ("blocks.0", "blocks.1"),
)
HEAD = Padding(("head",), (layer("head", (50, 16)),))
IDS = torch.randint(0, 50, (16, 512))


def run(device: str = "cpu") -> Run:
    return Run(Model().to(device), IDS.to(device))


@dataclass(frozen=True)
class Breaking(Padding):
    """Pads, and then moves what was padded a little."""

    def apply(self, run: Run) -> Undo:
        edits = super().apply(run)
        for path in self.modules:
            run.model.get_submodule(path).__class__ = Moved
        return edits


class Moved(PaddedLinear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1e-6 * (input.sum() if self.least_rows == 0 else 0.0)


@pytest.mark.parametrize("candidate", [CHAIN, HEAD])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        ({}, "whole model"),
        ({"WHOLE_MODEL_PARAMETERS": 0}, ""),
        ({"WHOLE_MODEL_FLOP": 0}, ""),
        ({"WHOLE_MODEL_PARAMETERS": 0, "SCOPE_PARAMETERS": 0}, "miniature"),
    ],
)
def test_a_proof_and_its_failure_at_any_size(
    candidate: Padding, device: str, limits: dict[str, int], scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(proof, name, value)
    good = prove(run(device), candidate)
    assert good.ok, good
    assert scope in good.scope
    if scope != "whole model":
        assert candidate.scopes[0] in good.scope
    broken = Breaking(candidate.modules, candidate.layers, candidate.parents)
    assert not prove(run(device), broken).ok


def test_equal_modules_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "WHOLE_MODEL_PARAMETERS", 0)
    assert prove(run(), CHAIN).scope == "blocks.0"


def test_the_model_and_the_random_numbers_stay_as_they_are() -> None:
    before = run()
    state = copy.deepcopy(before.model.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    prove(before, CHAIN)
    assert torch.equal(torch.rand(1), expected)
    assert not any(isinstance(module, PaddedLinear) for module in before.model.modules())
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_large_module_that_cannot_be_made_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Padding):
        miniature = ChangeSet.miniature

    monkeypatch.setattr(proof, "WHOLE_MODEL_PARAMETERS", 0)
    monkeypatch.setattr(proof, "SCOPE_PARAMETERS", 0)
    with pytest.raises(RefusedError, match="head has 850 parameters, too many"):
        prove(run(), Large(HEAD.modules, HEAD.layers))


def test_a_module_that_is_not_called_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "WHOLE_MODEL_PARAMETERS", 0)
    before = run()
    before.model.spare = nn.Linear(16, 21)
    with pytest.raises(RefusedError, match="spare was not called"):
        prove(before, Padding(("spare",), (layer("spare", (21, 16)),)))


class Fixed(nn.Module):
    """Takes sequences of one length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(-1, 10, 3))


def test_inputs_are_cut_only_as_far_as_the_model_takes_it() -> None:
    padding = Padding(("layer",), (layer("layer", (5, 3)),))
    assert prove(Run(Fixed(), torch.randn(64, 10, 3)), padding).ok
    with pytest.raises(RefusedError, match="does not run"):
        prove(Run(Fixed(), torch.randn(64, 7, 3)), padding)


def test_zeros_are_no_values() -> None:
    """A bias that is zero everywhere, and an input of zeros, would hide a mistake."""

    class NoBias(PaddedLinear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.linear(input, self.weight) + 0 * self.bias

    @dataclass(frozen=True)
    class Forgetting(Padding):
        def apply(self, run: Run) -> Undo:
            edits = super().apply(run)
            run.model.get_submodule("head").__class__ = NoBias
            return edits

    before = replace(run(), options=StepOptions(train=False))
    nn.init.zeros_(before.model.head.bias)
    assert not prove(before, Forgetting(HEAD.modules, HEAD.layers)).ok


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
    padding = Padding(("layer",), (layer("layer", (5, 3)),))
    for proof_of in (prove, prove_in_place):
        with pytest.raises(RefusedError, match="raised TypeError: half precision"):
            proof_of(Run(Half(), torch.randn(8, 3)), padding)
    plan = tilefit.optimize(
        Half(), torch.randn(65536, 3), gpu="h200", amp="bf16", select=["pad-linear"], min_gain=-1.0
    )
    assert not plan.fixes
    assert any("half precision" in refused.reason for refused in plan.refused)


def test_where_it_is_without_inputs_that_have_values() -> None:
    assert prove_in_place(replace(run(), inputs=IDS.to("meta")), CHAIN).ok


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_where_it_is_and_in_its_own_precision(amp: Amp) -> None:
    before = replace(run(), options=StepOptions(amp=amp))
    before.model.head.bias.grad = torch.ones(50)
    state = copy.deepcopy(before.model.state_dict())
    good = prove_in_place(before, CHAIN)
    assert good.ok, good
    assert good.dtype == ("float32" if amp == "off" else "bfloat16")
    assert not any(isinstance(module, PaddedLinear) for module in before.model.modules())
    assert torch.equal(before.model.head.bias.grad, torch.ones(50))
    assert before.model.head.weight.grad is None
    assert before.model.training
    for name, value in before.model.state_dict().items():
        assert torch.equal(value, state[name])

    @dataclass(frozen=True)
    class Off(Padding):
        def apply(self, run: Run) -> Undo:
            edits = super().apply(run)
            layer = run.model.get_submodule("head")
            with torch.no_grad():
                layer.weight.mul_(1.2)
            return edits

    assert not prove_in_place(before, Off(HEAD.modules, HEAD.layers)).ok


@pytest.mark.parametrize("left_over", [float("nan"), float("inf"), 3e38, 1e-42])
def test_what_lay_in_memory_is_no_input(left_over: float) -> None:
    """``torch.empty`` gives a shape; what it holds must not decide whether a fix is proven."""
    x = torch.zeros(4, 3)
    x[0] = torch.tensor([left_over, left_over / 2, left_over / 4])
    x[1, 0] = left_over / 8 if left_over < 1 else 1.0
    found = _with_values((x, torch.arange(6.0)), nn.Linear(3, 3))
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

    x = torch.zeros(4, 8, 16)
    x.view(-1)[:places] = left_over * torch.arange(1, places + 1)
    chain = Padding(("up", "down"), (layer("up", (21, 16), True), layer("down", (16, 21))), ("",))
    assert prove(Run(Mixed(), x), chain).ok
    assert prove(Run(Mixed(), torch.randn(4, 8, 16) * left_over), chain).ok


def test_large_inputs_are_made_smaller_and_keep_their_signs() -> None:
    x = torch.tensor([-30000.0, 0.0, 15.0])
    assert _with_values(x, nn.Linear(3, 3)).equal(torch.tensor([-10.0, 0.0, 0.005]))


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_masks_keep_their_values(hidden: float) -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), hidden)
    assert _with_values({"x": mask}, nn.Linear(3, 3))["x"].equal(mask)
