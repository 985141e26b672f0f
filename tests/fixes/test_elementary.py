"""Activations and normalizations that are written out, by the kernel there is for them."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tilefit
from fixing import fixed
from tilefit.capture import capture
from tilefit.fixes import ChangeSet
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.elementary import Elementary, recognised


class WrittenGelu(nn.Module):
    """As GPT-2 has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class WrittenSwish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class QuickGelu(nn.Module):
    """Nearly GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


class InTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) if self.training else x


class WithWeight(WrittenSwish):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class Clamped(nn.Module):
    """A swish whose gradient is another one's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * torch.sigmoid(x)


@pytest.mark.parametrize(
    ("build", "function"),
    [
        (WrittenGelu, "gelu(approximate='tanh')"),
        (WrittenSwish, "silu"),
        (QuickGelu, ""),
        (InTraining, ""),
        (WithWeight, ""),
        (Clamped, ""),
        (lambda: nn.Softmax(dim=-1), ""),
    ],
)
def test_which_function_a_module_computes(build: Callable[[], nn.Module], function: str) -> None:
    found = recognised(build())
    assert (found.function if found else "") == function


class RmsNorm(nn.Module):
    """As Llama has it."""

    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class ShiftedWeight(RmsNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x / x.norm(dim=-1, keepdim=True)


class WithoutEpsilon(RmsNorm):
    def __init__(self, size: int = 256) -> None:
        super().__init__(size)
        self.variance_epsilon = 0.0


def test_which_module_is_a_normalization() -> None:
    found = recognised(RmsNorm())
    assert found is not None
    assert (found.function, found.epsilon) == ("rms_norm", 1e-5)
    for other in (ShiftedWeight(), WithoutEpsilon(), nn.LayerNorm(8), nn.Linear(8, 8)):
        assert recognised(other) is None


BETA = 1.0


class OfTheFile(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(BETA * x)


class OfTheClass(nn.Module):
    beta = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


class Capped(WrittenSwish):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(max=50.0)


class Cleaned(WrittenSwish):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(super().forward(x), 0.0, posinf=1e4)


@pytest.mark.parametrize("kind", [OfTheFile, OfTheClass, Capped, Cleaned])
def test_functions_that_are_others_elsewhere(kind: type[nn.Module]) -> None:
    assert recognised(kind()) is None


def give(model: nn.Module, path: str, found: Elementary | None) -> None:
    assert found is not None
    ChangeSet.giving((path,), found, "").apply(Run(model))


def test_an_attribute_that_changes_later_counts() -> None:
    original = nn.Sequential(Annealed()).double()
    model = copy.deepcopy(original)
    x = torch.tensor([1.0, 40.0, math.nan, math.inf, -math.inf], dtype=torch.double)
    give(model, "0", recognised(model[0]))
    for beta in (1.0, 2.0):
        for each in (original, model):
            each[0].beta = beta
        torch.testing.assert_close(model(x), original(x), equal_nan=True)


class OfSums(RmsNorm):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if residual is None else x + residual)


def test_arguments_that_a_function_has_not() -> None:
    original, x = OfSums(8).double(), torch.randn(4, 8, dtype=torch.double)
    changed = copy.deepcopy(original)
    give(changed, "", recognised(changed))
    torch.testing.assert_close(changed(x), original(x))
    torch.testing.assert_close(changed(x=x), original(x=x))
    torch.testing.assert_close(changed(x, residual=x), original(x, x))


def test_element_types_of_results() -> None:
    """On shapes alone, as on a GPU; the CPU computes what was written."""
    for module, shape in ((RmsNorm(8), (4, 8)), (WrittenGelu(), (4, 8))):
        for weight in (torch.float32, torch.bfloat16):
            original = copy.deepcopy(module).to("meta", weight)
            changed = copy.deepcopy(original)
            found = recognised(changed, "bf16")
            give(changed, "", found)
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                x = torch.empty(shape, dtype=dtype, device="meta")
                assert changed(x).dtype == original(x).dtype


class Block(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.act = RmsNorm(width), WrittenGelu()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


X = torch.empty(16, 1024, 256, device="meta")


def test_both_are_found_priced_and_proven() -> None:
    model = Block()
    plan = tilefit.optimize(model, X, gpu="h200", amp="bf16", select=["PRC004"])
    assert {fix.name for fix in plan.fixes} == {"fuse-activations", "fuse-normalizations"}
    assert all(fix.gain_s > 0 for fix in plan.fixes)
    assert plan.verification is not None
    assert plan.verification.ok
    assert isinstance(model.act, WrittenGelu)
    plan.undo()
    assert type(model.act) is WrittenGelu
    assert type(model.norm) is RmsNorm


def test_in_the_working_type_it_is_within_rounding() -> None:
    model = Block()
    changed = fixed(model, X, select=["PRC004"]).model
    x = torch.randn(4, 7, 256)
    assert tilefit.verify(model, changed, x).ok
    assert tilefit.verify(model, changed, x, amp="bf16", dtype=torch.float32).ok
    assert tilefit.verify(model, changed, x, dtype=torch.bfloat16).ok
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert changed(x).dtype == model(x).dtype


def test_the_kernels_that_were_written_out_are_gone() -> None:
    def kernels(model: nn.Module) -> int:
        return len(tilefit.check(model, X, gpu="h200", amp="bf16").ops)

    model = Block()
    assert kernels(fixed(model, X, select=["PRC004"]).model) < kernels(model) - 20


def test_copies_pickles_and_the_compiler() -> None:
    changed = fixed(Block(), X, select=["PRC004"]).model
    file = io.BytesIO()
    torch.save(changed, file)
    file.seek(0)
    x = torch.randn(2, 3, 256)
    compiled = torch.compile(changed, backend="aot_eager", fullgraph=True)
    for other in (copy.deepcopy(changed), torch.load(file, weights_only=False), compiled):
        torch.testing.assert_close(other(x), changed(x))


def test_a_wide_result_stays_wide() -> None:
    """As under autocast, where ``pow`` is fp32."""
    model = Block()
    step = capture(fixed(model, X, select=["fuse-activations"]).model, X, amp="bf16")
    (gelu,) = (entry for entry in step.ops if entry.name == "aten.gelu")
    assert gelu.outputs[0].dtype == "fp32"
