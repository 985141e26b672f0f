"""Lower precision is only used where it was allowed, and taken back exactly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from tilefit.capture.tf32 import allow_tf32
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.settings import AUTOCAST


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    take_back = allow_tf32(False)
    yield
    take_back()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.Linear(1024, 1024))


def plan(which: nn.Module, *names: str, gpu: str = "h200", **options: Any) -> tilefit.Plan:
    x = torch.empty(1 << 18, 1024, device="meta")
    return tilefit.optimize(which, x, gpu=gpu, select=names, **options)


def test_nothing_unsafe_without_being_asked() -> None:
    assert not plan(model(), "tf32", "mixed-precision").fixes
    assert torch.get_float32_matmul_precision() == "highest"


def test_tf32() -> None:
    found = plan(model(), "tf32", level="unsafe")
    (fix,) = found.fixes
    assert fix.level == "unsafe"
    assert found.speedup > 1.5
    assert found.run.options.tf32
    assert torch.get_float32_matmul_precision() == "high"
    found.undo()
    assert found.run.options.tf32 is None
    assert torch.get_float32_matmul_precision() == "highest"


def test_switches_of_the_newer_kind_are_as_they_were() -> None:
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision = "ieee"
    found = plan(model(), "tf32", level="unsafe")
    assert [fix.name for fix in found.fixes] == ["tf32"]
    assert (cudnn.conv.fp32_precision, torch.get_float32_matmul_precision()) == ("tf32", "high")
    pickle.loads(pickle.dumps(found.edits)).undo()
    assert (cudnn.conv.fp32_precision, torch.get_float32_matmul_precision()) == ("ieee", "highest")


def test_mixed_precision_is_worth_more_and_leaves_tf32_nothing() -> None:
    found = plan(model(), "tf32", "mixed-precision", level="unsafe")
    assert [fix.name for fix in found.fixes] == ["mixed-precision"]
    assert found.run.options.autocast == "bf16"
    assert torch.get_float32_matmul_precision() == "highest"
    found.undo()
    assert found.run.options.autocast == ""
    assert type(found.model) is nn.Sequential


def test_autocast_goes_with_the_model() -> None:
    original = model()
    changed = copy.deepcopy(original)
    AUTOCAST.apply(Run(changed))
    x = torch.randn(4, 1024)
    for which in (changed, copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        y = which(x)
        assert y.dtype == torch.float32
        assert not torch.equal(y, original(x))
        torch.testing.assert_close(y, original(x), rtol=0.05, atol=0.05)
    changed(x).square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in changed.parameters())
    assert changed.state_dict().keys() == original.state_dict().keys()
    compiled = torch.compile(changed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), changed(x))


def test_a_gpu_without_bf16() -> None:
    found = plan(model(), "mixed-precision", gpu="t4", level="unsafe")
    assert not found.fixes
    assert "GradScaler" in found.refused[0].reason
    assert not plan(model(), "tf32", gpu="v100-sxm2-16gb", level="unsafe").fixes


@pytest.mark.parametrize("options", [{"amp": "bf16"}, {"amp": "fp16"}])
def test_a_model_in_mixed_precision_has_nothing_to_gain(options: dict[str, Any]) -> None:
    found = plan(model(), "tf32", "mixed-precision", level="unsafe", **options)
    assert not found.fixes
    assert not found.refused


def test_a_change_is_made_once_whatever_it_gains() -> None:
    class Attention(nn.Module):
        """Whose kernel stays one of fp32, so that there is always something to do."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model, x = nn.Sequential(nn.Linear(64, 64), Attention()), torch.empty(2, 4, 32, 64, device="meta")
    plan = tilefit.optimize(model, x, gpu="h200", level="unsafe", select=["tf32"], min_gain=-1e9, budget=2)
    assert [fix.name for fix in plan.fixes] == ["tf32"]
