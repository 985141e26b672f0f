"""A batch that is filled up inside the model."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

import tilefit
from fixing import fixed
from tilefit.fixes import Plan


class Transposed(nn.Module):
    """Works on [features, batch], so that the batch is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2048, 1024) / 32)
        self.second = nn.Parameter(torch.randn(1024, 2048) / 32)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"y": (self.second @ torch.tanh(self.first @ x.t())).t(), "rows": 1}


def plan_of(model: nn.Module, rows: int = 65531, **options: object) -> Plan:
    return fixed(model, torch.empty(rows, 1024, device="meta"), select=["pad-rows"], **options)


def test_an_odd_batch_is_filled_up_and_cut() -> None:
    plan = plan_of(Transposed())
    assert plan.speedup > 1.5
    assert plan.verification is not None
    assert plan.verification.ok
    x = torch.randn(11, 1024)
    assert plan.model(x)["y"].shape == (11, 1024)
    assert plan.model(x)["rows"] == 1


def test_a_plan_is_the_model() -> None:
    model = Transposed()
    changed = plan_of(model).model
    for rows in (1, 7, 8):
        assert tilefit.verify(model, changed, torch.randn(rows, 1024)).ok
    assert isinstance(changed, Transposed)
    model.load_state_dict(changed.state_dict(), strict=True)
    file = io.BytesIO()
    torch.save(changed, file)
    file.seek(0)
    x = torch.randn(3, 1024)
    for other in (copy.deepcopy(changed), torch.load(file, weights_only=False)):
        assert torch.equal(other(x)["y"], changed(x)["y"])


def test_an_aligned_batch_is_left_alone() -> None:
    assert not plan_of(Transposed(), rows=65536).fixes


class Normalized(Transposed):
    """Rows see each other."""

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = super().forward(x)["y"]
        assert isinstance(y, torch.Tensor)
        return {"y": y - y.mean(0)}


class WithLoss(Transposed):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = super().forward(x)["y"]
        assert isinstance(y, torch.Tensor)
        return {"loss": y.square().mean()}


class Dropping(Transposed):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def test_where_rows_see_each_other_it_is_refused() -> None:
    for model, where in (
        (Normalized(), "eval: output"),
        (WithLoss(), "eval: output"),
        (Dropping(), "random numbers"),
    ):
        plan = plan_of(model)
        assert not plan.fixes
        assert any(where in refused.reason for refused in plan.refused), plan.refused


def test_other_outputs_are_refused() -> None:
    class Centred(Transposed):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.randn(64, 16))

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {**super().forward(x), "centres": self.centres}

    plan = plan_of(Centred())
    assert not plan.fixes
    assert "not every tensor" in plan.refused[0].reason


def test_several_inputs_are_refused() -> None:
    class Two(Transposed):
        def forward(self, x: torch.Tensor, z: torch.Tensor) -> dict[str, object]:
            return super().forward(x + z)

    x = torch.empty(4091, 1024, device="meta")
    plan = fixed(Two(), (x, x), select=["pad-rows"])
    assert "2 tensors" in plan.refused[0].reason
