"""Masks made contiguous: the same model, whose attention is fused."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from encoders import Encoder, SelfAttention
from tilefit.capture import capture
from tilefit.fixes import Plan
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.attention.attention import with_contiguous_masks
from tilefit.ops import Attention, Step
from tilefit.options import StepOptions


def fixed(model: torch.nn.Module, inputs: Any = None, **options: Any) -> Plan:
    x = torch.empty(32, 512, 512, device="meta") if inputs is None else inputs
    return tilefit.optimize(model, x, gpu="h200", amp="bf16", select=["contiguous-masks"], **options)


def attentions(step: Step) -> int:
    return sum(isinstance(entry.op, Attention) for entry in step.ops)


def test_attention_is_fused_and_the_model_is_the_same() -> None:
    model = Encoder("expanded")
    plan = fixed(model)
    (fix,) = plan.fixes
    assert fix.name == "contiguous-masks"
    assert fix.modules == ("layers.0", "layers.1")
    assert fix.gain_s > 0.1 * plan.before_s
    assert fix.verification is not None
    assert fix.verification.ok
    step = capture(model, torch.empty(32, 512, 512, device="meta"), amp="bf16")
    assert attentions(step) == 4


def test_a_mask_of_the_compiler_alone_is_found_there_and_compiles_in_one_graph() -> None:
    model = Encoder("compiling", width=32, heads=2, dropout=0.0).eval()
    x = torch.randn(2, 16, 32)
    before = model(x)
    assert not fixed(model, x, min_gain=-1.0).fixes
    strides = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if "scaled_dot_product" in str(node.target):
                strides.append(node.kwargs["attn_mask"].meta["example_value"].stride())
        return graph

    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert torch.allclose(compiled(x), before, atol=1e-6)
        fixed(model, x, compile=True, min_gain=-1.0)
    assert [stride[-1] for stride in strides] == [0, 0, 1, 1]
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def test_gradients_under_aot_autograd_are_those_of_the_model() -> None:
    model = Encoder("expanded", width=32, heads=2, dropout=0.0)
    other = copy.deepcopy(model)
    fixed(other, torch.empty(2, 16, 32, device="meta"), min_gain=-1.0)
    x = torch.randn(2, 16, 32)
    torch._dynamo.reset()
    for each in (model, torch.compile(other, backend="aot_eager", fullgraph=True)):
        each(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_copies_and_pickles_keep_it_and_undo_takes_it_back() -> None:
    model = Encoder("expanded", width=32, heads=2)
    kept = [type(layer) for layer in model.layers]
    plan = fixed(model, torch.empty(2, 16, 32, device="meta"), min_gain=-1.0)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ]
    x = torch.empty(2, 16, 32, device="meta")
    assert [attentions(capture(each, x)) for each in copies] == [4, 4, 4]
    plan.undo()
    assert [type(layer) for layer in model.layers] == kept
    assert not attentions(capture(model, x))


@pytest.mark.parametrize("mask", ["contiguous", "none"])
def test_a_mask_that_is_contiguous_is_left_alone(mask: str) -> None:
    assert not fixed(Encoder(mask), min_gain=-1.0).fixes


def test_a_mask_that_the_module_makes_itself() -> None:
    class Makes(SelfAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, x.new_ones(x.shape[1], 1).bool().expand(-1, x.shape[1]))

    model = Encoder("expanded")
    model.layers[0] = Makes(512, 8, 0.1)
    (fix,) = fixed(model).fixes
    assert fix.modules == ("layers.0", "layers.1")
    assert attentions(capture(model, torch.empty(32, 512, 512, device="meta"), amp="bf16")) == 4


class Given(Encoder):
    """Its layers are given a mask of one column that is repeated."""

    def __init__(self, dtype: torch.dtype, dimensions: int) -> None:
        super().__init__()
        self.dtype, self.dimensions = dtype, dimensions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        sizes = (1,) * (self.dimensions - 2)
        column = torch.ones(*sizes, length, 1, dtype=self.dtype, device=x.device)
        for layer in self.layers:
            x = x + layer(x, mask=column.expand(*sizes, length, length))
        return x


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])  # autocast copies others
def test_masks_without_dimensions_for_batch_or_heads(dtype: torch.dtype, dimensions: int) -> None:
    (fix,) = fixed(Given(dtype, dimensions)).fixes
    assert fix.modules == ("layers.0", "layers.1")
    assert fix.verification is not None
    assert fix.verification.ok


class Cached(SelfAttention):
    """Writes keys to a cache that it is given, in a layout of its own."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:, : x.shape[1]] += x.detach()
        return super().forward(x, mask)


def test_other_arguments_are_the_callers() -> None:
    model, x = Cached(32, 2, 0.0), torch.randn(2, 16, 32)
    mask = torch.ones(16, 1, dtype=torch.bool).expand(16, 16)
    run = Run(nn.Sequential(model), options=StepOptions(amp="bf16"))
    with_contiguous_masks(("0",)).apply(run)
    for arguments in ({}, {"mask": mask}):
        cache = torch.zeros(2, 32, 16).transpose(1, 2)
        given = (x,) if arguments else (x, mask)
        model(*given, cache=cache, **arguments)
        assert torch.equal(cache, x)


def test_a_mask_that_is_written_to_is_the_callers() -> None:
    class Writing(nn.Module):
        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            return mask.masked_fill_(mask > 0.5, 2.0)

    model, mask = nn.Sequential(Writing()), torch.rand(4, 6).t()
    expected = mask.masked_fill(mask > 0.5, 2.0)
    with_contiguous_masks(("0",)).apply(Run(model))
    torch.testing.assert_close(model[0](mask), expected)
    torch.testing.assert_close(mask, expected)


def test_a_forward_that_was_replaced_is_refused() -> None:
    model = Encoder("expanded", layers=1)
    model.layers[0].forward = model.layers[0].forward  # type: ignore[method-assign]
    plan = fixed(model)
    assert not plan.fixes
    assert any("forward method" in refused.reason for refused in plan.refused)
