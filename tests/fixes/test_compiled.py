"""compilation is chosen where its fusion is predicted to pay, and can be taken back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from encoders import Encoder
from tilefit.fixes.changes.behaviour import Changed, behaviours, changes
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.attention.attention import fusing
from tilefit.fixes.kinds.settings import DEFAULT, REDUCE_OVERHEAD, UnderAutocast, compilation


class Gated(nn.Module):
    """Mostly streaming operations."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate(x)
        for _ in range(6):
            y = torch.tanh(y * 1.5 + x).sigmoid() * x
        return y


def plan(model: nn.Module, rows: int, **options: object) -> tilefit.Plan:
    x = torch.empty(rows, 512)
    return tilefit.optimize(model, x, gpu="h200", amp="bf16", select=["compile"], **options)  # type: ignore[arg-type]


def test_chains_of_streaming_operations_are_compiled() -> None:
    model = Gated()
    found = plan(model, 1 << 20)
    assert [fix.name for fix in found.fixes] == ["compile"]
    assert found.candidates == (compilation(DEFAULT),)
    assert found.run.options.compile
    assert found.speedup > 1.5
    assert model._compiled_call_impl is not None
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    found.edits.undo()
    assert not found.run.options.compile
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_of_a_model_that_is_compiled_before_it_is_changed_stay_changed(of: Any) -> None:
    model = Gated()
    model.compile()
    behaviour = UnderAutocast()
    Changed.of(model).add(behaviour)
    other = of(model)
    assert behaviours(other) == (behaviour,)
    for each in (model, other):
        assert changes(each).assumed.holds(each)


def test_a_model_of_pytorchs_own_modules_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compiler(function, backend=backend))
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)))
    edits = compilation(DEFAULT).apply(Run(model, (torch.randn(2, 8),)))
    model(torch.randn(2, 8))
    assert graphs == [3]
    edits.undo()


def test_hooks_that_come_later_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compiler(function, backend="eager"))
    torch._dynamo.reset()
    model, x, seen = Gated(), torch.randn(2, 512), []
    compilation(DEFAULT).apply(Run(model, (x,)))
    model(x)
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(x)
    assert len(seen) == 1


class Product(nn.Module):
    """Returns a product in a view of it, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"output": (x @ self.weight.mT).view(-1), "x": x}


class Replay(torch.autograd.Function):
    """Its product, whose output and gradients lie in the same memory every time, as those of a CUDA graph."""

    @staticmethod
    def forward(ctx: Any, memory: list[torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.memory = memory
        ctx.save_for_backward(x, weight)
        return memory[0].copy_(x @ weight.mT).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_input = ctx.memory[1].copy_(gradient @ weight).detach() if ctx.needs_input_grad[1] else None
        return None, by_input, ctx.memory[2].copy_(gradient.mT @ x).detach()


def test_what_graphs_return_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(function: Any, mode: str) -> Any:
        weight, memory = function.__self__.weight, [torch.empty(5, 3), torch.empty(5, 4), torch.empty(3, 4)]
        return lambda x: {"output": Replay.apply(memory, x, weight).view(-1), "x": x}

    original = Product()
    model = copy.deepcopy(original)
    monkeypatch.setattr(torch, "compile", replayed)
    compilation(REDUCE_OVERHEAD).apply(Run(model))
    seen: dict[nn.Module, list[Any]] = {original: [], model: []}
    for number, x in enumerate(torch.randn(6, 5, 4)):
        for each, kept in seen.items():
            leaf = x.clone().requires_grad_(number > 1)
            found = each(leaf)
            assert found["x"] is leaf
            found["output"].square().sum().backward()
            kept.append((found["output"], leaf.grad, each.weight.grad))
            if number < 3:  # later ones are added up
                each.weight.grad = None
    torch.testing.assert_close(seen[model], seen[original])


def test_a_step_that_waits_for_the_host_gets_graphs() -> None:
    found = plan(Gated(), 64)
    assert found.candidates == (compilation(REDUCE_OVERHEAD),)
    assert "reduce-overhead" in found.fixes[0].summary


class TwoHeads(Gated):
    """Scores in two ways, of which a step may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, self.other(y)


def test_where_a_head_gets_no_gradient_the_compiler_would_make_zeros() -> None:
    compiled = torch.compile(TwoHeads(), backend="aot_eager")
    compiled(torch.ones(2, 512))[0].sum().backward()
    assert not compiled.other.weight.grad.any()  # the reason for what follows

    found = plan(TwoHeads(), 1 << 20, loss=lambda output: output[0].mean())
    assert not found.fixes
    assert "zeros" in found.refused[0].reason
    assert [fix.name for fix in plan(TwoHeads(), 1 << 20).fixes] == ["compile"]
    x = torch.empty(1 << 20, 512, device="meta")
    report = tilefit.check(TwoHeads(), x, gpu="h200", amp="bf16", loss=lambda output: output[0].mean())
    (finding,) = (each for each in report.findings if each.code == "NTC001")
    assert (finding.safety, "zeros" in finding.fix) == ("advice", True)


def test_products_gain_nothing() -> None:
    model = nn.Sequential(nn.Linear(512, 16384, bias=False), nn.Linear(16384, 512, bias=False))
    assert not plan(model, 1 << 16, train=False, verify=False).fixes


class Attention(nn.Module):
    """Attention written by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT / 8).softmax(-1) @ x


def test_on_top_of_fused_attention_it_is_priced_as_it_will_run() -> None:
    kernels = []
    for fixes in (
        [],
        [fusing(("0",))],
        [compilation(DEFAULT)],
        [fusing(("0",)), compilation(DEFAULT)],
    ):
        run = Run(nn.Sequential(Attention()), torch.empty(2, 64, 64, requires_grad=True)).on_meta()
        for fix in fixes:
            fix.apply(run)
        kernels.append([entry.name for entry in run.capture().ops])
    assert kernels[1] != kernels[0]
    assert kernels[3] == kernels[2] == kernels[0]


def test_it_comes_after_what_changes_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(60, 90, 3), nn.BatchNorm2d(90), nn.ReLU(), nn.Conv2d(90, 60, 3))
    images = torch.empty(256, 60, 128, 128, device="meta")
    found = tilefit.optimize(
        model,
        images,
        gpu="h200",
        amp="bf16",
        channels_last=True,
        select=["compile", "pad-channels"],
        verify=False,
    )
    assert [fix.name for fix in found.fixes] == ["pad-channels", "compile"]


def test_a_model_to_be_compiled_anyway_is_left_to_that() -> None:
    assert not plan(Gated(), 1 << 20, compile=True).fixes


def test_a_model_to_be_compiled_anyway_gets_graphs_where_it_waits_for_the_host() -> None:
    assert plan(Gated(), 64, compile=True).candidates == (compilation(REDUCE_OVERHEAD),)


def test_what_the_compiler_pads_at_a_price_is_padded_for_good() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 5461), nn.ReLU(), nn.Linear(5461, 2048))
        x = torch.empty(32768, 2048)
    options: dict[str, object] = {"gpu": "h200", "amp": "bf16", "verify": False, "select": ["pad-linear"]}
    compiled = tilefit.optimize(model, x, compile=True, **options)  # type: ignore[arg-type]
    assert {fix.name for fix in compiled.fixes} == {"pad-linear"}
    speedup = compiled.speedup
    compiled.edits.undo()
    # There it saves copies; eager, the slow kernels of odd sizes.
    assert 1 < speedup < tilefit.optimize(model, x, **options).speedup  # type: ignore[arg-type]


class Reading(Gated):
    """Reads a value: the compiler splits it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.rand([], device="cpu") >= 0.0 else x


class Remembering(Gated):
    """Has a recurrent layer, which the compiler runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.memory(x)[0])


@pytest.mark.parametrize("model", [Reading, Remembering])
def test_a_model_that_the_compiler_splits_gets_no_graphs(model: type[nn.Module]) -> None:
    assert not plan(model(), 64, compile=True).fixes


def test_graphs_that_the_compiler_makes_are_not_missed() -> None:
    found = tilefit.optimize(
        Gated(), torch.empty(64, 512), gpu="h200", amp="bf16", select=["compile", "cuda-graph"]
    )
    assert found.candidates == (compilation(REDUCE_OVERHEAD),)
    assert not found.refused
    alone = tilefit.optimize(Gated(), torch.empty(64, 512), gpu="h200", amp="bf16", select=["cuda-graph"])
    assert "Python" in alone.refused[0].reason


def test_compilation_is_priced_with_the_masks_that_only_it_makes() -> None:
    def planned(*select: str, **options: object) -> tilefit.Plan:
        x = torch.empty(16, 1024, 512, device="meta")
        with torch.device("meta"):
            model = Encoder("compiling")
        return tilefit.optimize(model, x, gpu="h200", amp="bf16", select=select, **options)  # type: ignore[arg-type]

    # Attention that compilation keeps from the fused kernels costs more than it saves.
    assert not planned("compile").fixes
    assert not planned("contiguous-masks").fixes
    plan = planned("compile", "contiguous-masks", "fuse-optimizer")
    assert [fix.name for fix in plan.fixes] == ["fuse-optimizer", "compile"]
    (_, fix) = plan.fixes
    assert fix.modules == ("layers.0", "layers.1")
    assert "mask" in fix.summary
    assert "torch.compile(model" in fix.summary
    assert fix.verification is not None
    assert fix.verification.ok
    assert plan.after_s < planned("fuse-optimizer", verify=False).after_s


def test_what_is_changed_with_compilation_is_taken_back_with_it() -> None:
    model = Encoder("compiling")
    x = torch.empty(16, 1024, 512, device="meta")
    plan = tilefit.optimize(model, x, gpu="h200", amp="bf16", select=["compile", "contiguous-masks"])
    assert plan.run.options.compile
    assert model._compiled_call_impl is not None
    assert all(map(behaviours, model.layers))
    plan.edits.undo()
    assert not plan.run.options.compile
    assert model._compiled_call_impl is None
    assert not any(map(behaviours, model.layers))
