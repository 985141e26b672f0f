"""Fixes on a real GPU: proven in the working precision, measured, and never a loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilefit
from tilefit.fixes.changes.behaviour import behaves
from tilefit.fixes.kinds.padding.layers import Fitted

pytestmark = pytest.mark.gpu


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 30001, width: int = 512) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2047), nn.GELU(), nn.Linear(2047, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        logits = self.head(x + self.mlp(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_a_padded_model_is_proven_measured_and_faster() -> None:
    model = LanguageModel().cuda()
    ids = torch.randint(0, 30001, (8, 1024), device="cuda")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = tilefit.optimize(model, (ids,), gpu="h200", amp="bf16", select=["ALN"], measure=True)
    assert {fix.name for fix in plan.fixes} == {"pad-vocabulary", "pad-linear"}
    assert plan.provenance == "measured"
    assert plan.speedup > 1.1
    assert plan.verification is not None
    assert plan.verification.ok
    assert plan.on_gpu is not None
    assert plan.on_gpu.ok
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    plan.undo()
    assert not any(behaves(module, Fitted) for module in model.modules())


def test_a_healthy_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    x = torch.randn(32768, 1024, device="cuda")
    plan = tilefit.optimize(model, x, gpu="h200", amp="bf16", select=["ALN"], measure=True)
    assert plan.fixes == ()
    assert plan.speedup == pytest.approx(1.0, abs=0.02)


def test_gradients_accumulate_and_the_compiler_agrees() -> None:
    model = LanguageModel().cuda()
    ids = torch.randint(0, 30001, (4, 256), device="cuda")
    changed = tilefit.optimize(
        model, (torch.empty(8, 1024, dtype=torch.int64, device="meta"),), gpu="h200", amp="bf16",
        select=["ALN"], inplace=False,
    ).model  # fmt: skip
    compiled = torch.compile(changed, fullgraph=True)
    for run in (model, changed, compiled):
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(ids)
            loss.backward()
    for (name, a), b in zip(model.named_parameters(), changed.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        # The changed model took four steps: two eager, two compiled.
        assert (b.grad / 2 - a.grad).norm() <= 2e-2 * a.grad.norm(), name
