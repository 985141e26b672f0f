"""Parts of a model, compiled alone. On the CPU they run as they are written, so that here the compiler is
PyTorch's that generates no code, wherever a part is called."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import tilefit
from fixable import WrittenGelu, WrittenNorm
from fixing import fixed
from in_use import difference
from tilefit.cost import estimate_step
from tilefit.cost.priced import priced
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds import parts
from toolchain import STRIP_FIRST, STRIPPED, TOOLS, WORKS, verdict


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.act = WrittenNorm(width), WrittenGelu()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


X = torch.empty(16, 1024, 64, device="meta")


def compile_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are compiled on the CPU as well."""
    monkeypatch.setattr(
        parts, "_is_on_gpu", lambda tensor: tensor is None or (tensor.is_cpu and type(tensor) in parts.PLAIN)
    )
    monkeypatch.setattr(parts, "_BACKEND", "aot_eager")


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """Nothing is compiled before a test, nor after it."""
    parts.compiled.cache_clear()
    torch.compiler.reset()
    counters.clear()
    yield
    parts.compiled.cache_clear()
    torch.compiler.reset()


@pytest.fixture
def _compiling(_forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_here(monkeypatch)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_parts_are_found_priced_and_proven() -> None:
    model = nn.Sequential(Block(256), Block(256))
    x = torch.empty(512, 1024, 256, device="meta")
    plan = tilefit.optimize(model, x, gpu="h200", amp="bf16", select=["PRC004"])
    assert [fix.name for fix in plan.fixes] == ["compile-parts"] * 2
    assert {fix.summary for fix in plan.fixes} == {
        "Compile WrittenGelu alone (2 modules).", "Compile WrittenNorm alone (2 modules).",
    }  # fmt: skip
    assert all(fix.gain_s > 0 for fix in plan.fixes)
    assert plan.verification is not None
    assert plan.verification.ok
    plan.undo()
    assert not any(parts.behaviours(module) for module in model.modules())


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_a_plan_captured_is_compiled_later(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture says of tensors on shapes alone, and on the CPU, that they are on a GPU."""
    x = torch.randn(64, 64) if on_cpu else X
    options: dict[str, Any] = {"on_cpu": on_cpu, "min_gain": -1.0, "verify": False}
    plan = tilefit.optimize(Block(), x, gpu="h200", select=["PRC004"], **options)
    assert [fix.name for fix in plan.fixes] == ["compile-parts"] * 2
    assert not graphs()
    compile_here(monkeypatch)
    plan.model(torch.randn(2, 64))
    assert graphs() == 2


def test_a_model_that_is_compiled_as_a_whole_does_without() -> None:
    x = torch.empty(512, 1024, 256, device="meta")
    plan = tilefit.optimize(Block(256), x, gpu="h200", amp="bf16", select=["PRC004", "NTC001"])
    alone = tilefit.optimize(Block(256), x, gpu="h200", amp="bf16", select=["NTC001"])
    assert [fix.name for fix in plan.fixes] == [fix.name for fix in alone.fixes] == ["compile"]
    assert plan.after_s == alone.after_s
    assert plan.fixes[0].gain_s == pytest.approx(plan.before_s - plan.after_s)


def test_what_is_not_a_part_costs_what_it_did() -> None:
    model = Block(256)
    run = Run(model.to("meta"), torch.empty(16, 1024, 256, device="meta"))
    written = run.capture()
    assert run.compiled(written) is written
    changed = fixed(model, run.inputs, select=["PRC004"], verify=False, amp="off").model
    compiled = Run(changed, run.inputs).compiled(written)
    kept = [[e.op for e in step.ops if e.site.module in ("up", "down", "")] for step in (written, compiled)]
    assert kept[0] == kept[1]
    own = [[e for e in step.ops if e.site.module in ("norm", "act")] for step in (written, compiled)]
    assert len(own[1]) < len(own[0]) / 3
    assert compiled.memory.peak_bytes < written.memory.peak_bytes
    assert compiled.settings == written.settings
    before, after = (estimate_step(step, priced("h200")) for step in (written, compiled))
    assert after.gpu_time_s < before.gpu_time_s


class Drops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * torch.sigmoid(x), 0.1, self.training)


class Single(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


class Multiplies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).sigmoid().square() @ x


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty_like(x).exponential_().square()


class TwoResults(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.both(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.both = Pair()


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sigmoid().square(), x.tanh().square()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = WrittenNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (2 * x).bfloat16()  # whose copy in fp32 is kept
        x += self.norm(x).bfloat16()
        return x.float()


@pytest.mark.parametrize(
    "other",
    [Drops, Noisy, Single, Multiplies, TwoResults, Residual, lambda: nn.Sequential(nn.SiLU(), nn.Tanh())],
)
def test_what_is_left_alone(other: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), other(), WrittenGelu())
    plan = fixed(model, X, select=["PRC004"], verify=False)
    assert [fix.modules for fix in plan.fixes] == [("2",)]


@pytest.mark.usefixtures("_compiling")
def test_layers_share_what_is_compiled() -> None:
    original = nn.Sequential(*(Block() for _ in range(12)))
    changed = fixed(original, X, select=["PRC004"], verify=False).model
    for rows in (3, 5, 6, 9):  # from the second size on whatever size it is
        x = torch.randn(rows, 7, 64)
        for model in (original, changed):
            model.zero_grad()
            model(x).square().mean().backward()
        torch.testing.assert_close(changed(x), original(x))
        for p, q in zip(original.parameters(), changed.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    assert 2 <= graphs() <= 8


@pytest.mark.usefixtures("_compiling")
def test_ways_to_call_it() -> None:
    original = Block()
    changed = fixed(original, X, select=["PRC004"], verify=False).model
    x = torch.randn(2, 7, 64)
    assert not difference(original.eval()(x), changed.eval()(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert not difference(original(x), changed(x))
        assert changed.act(x.bfloat16()).dtype == original.act(x.bfloat16()).dtype
    with torch.inference_mode():
        assert not difference(original(x), changed(x))
    assert graphs()
    changed.act.zero_grad()
    y = changed.act(x.requires_grad_())
    with pytest.raises(RuntimeError, match=r"double backward|donated_buffer=False"):
        torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum().backward()


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = x * torch.sigmoid(self.beta * x)
        return y if residual is None else y + residual


@pytest.mark.usefixtures("_compiling")
def test_attributes_and_arguments_that_change_later_count() -> None:
    original = nn.Sequential(nn.Linear(64, 64), Annealed())
    changed = fixed(original, X, select=["PRC004"], verify=False).model
    x = torch.tensor([1.0, 40.0, math.nan, math.inf, -math.inf])
    for beta in (1.0, 2.0):
        for each in (original, changed):
            each[1].beta = beta
        torch.testing.assert_close(changed[1](x), original[1](x), equal_nan=True)
        torch.testing.assert_close(changed[1](x, residual=x), original[1](x, x), equal_nan=True)
    assert graphs()


class Helped(nn.Module):
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.helper(x)


@pytest.mark.usefixtures("_compiling")
def test_a_method_that_is_exchanged_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = fixed(nn.Sequential(nn.Linear(64, 64), Helped()), X, select=["PRC004"], verify=False).model
    x = torch.randn(2, 64)
    torch.testing.assert_close(changed[1](x), F.silu(x))
    assert graphs()
    monkeypatch.setattr(Helped, "helper", lambda self, x: x)
    torch.testing.assert_close(changed[1](x), x * x)


@pytest.mark.usefixtures("_compiling")
def test_a_plan_is_of_the_model_as_it_is_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed() -> nn.Module:
        return fixed(nn.Sequential(nn.Linear(64, 64), Helped()), X, select=["PRC004"], verify=False).model

    x = torch.randn(2, 64)
    before = changed()
    monkeypatch.setattr(Helped, "helper", lambda self, x: x + 1)
    for model in (before, copy.deepcopy(before)):
        torch.testing.assert_close(model[1](x), x * (x + 1))
    assert not graphs()
    for model in ((after := changed()), copy.deepcopy(after), pickle.loads(pickle.dumps(after))):
        counters.clear()
        torch.compiler.reset()
        torch.testing.assert_close(model[1](x), x * (x + 1))
        assert graphs()


@pytest.mark.usefixtures("_compiling")
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_and_what_is_compiled(tool: str) -> None:
    expected = STRIPPED if "compile-parts" in STRIP_FIRST.get(tool, ()) else WORKS
    assert verdict(tool, "compile-parts") == expected


def test_copies_are_compiled_too_and_undone() -> None:
    changed = fixed(Block(), X, select=["PRC004"], verify=False).model
    twin = copy.deepcopy(changed)
    assert any(parts.behaves(module, parts.CompiledAlone) for module in twin.modules())
    tilefit.strip(twin)
    assert not any(parts.behaviours(module) for module in twin.modules())
