"""Recurrent layers by persistent kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tilefit
from tilefit.fixes import Plan
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds import persistent_layers


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(320, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


def planned(layer: nn.Module, **options: Any) -> tuple[Tagger, Plan]:
    model = Tagger(layer)
    settings: dict[str, Any] = {"gpu": "h200", "amp": "bf16", "select": ["persistent-kernels"], **options}
    return model, tilefit.optimize(model, torch.randn(50, 4, 32), **settings)


def test_layers_change_their_class_and_nothing_else() -> None:
    layer = nn.LSTM(32, 320, num_layers=2, dropout=0.2)
    before, parameters = copy.deepcopy(layer), list(layer.parameters())
    model, plan = planned(layer)
    (fix,) = plan.fixes
    assert (fix.name, fix.modules, fix.level) == ("persistent-kernels", ("layer",), "safe")
    assert fix.gain_s > 0.1 * plan.before_s
    assert fix.verification is not None
    assert fix.verification.ok
    assert model.layer is layer
    assert type(layer) is tilefit.nn.LSTM
    assert all(one is other for one, other in zip(layer.parameters(), parameters, strict=True))
    x = torch.randn(50, 4, 32)
    assert torch.equal(layer.eval()(x)[0], before.eval()(x)[0])
    plan.undo()
    assert type(layer) is nn.LSTM


def test_a_model_that_is_one_layer() -> None:
    model = nn.GRU(320, 320)
    plan = tilefit.optimize(
        model, torch.randn(500, 4, 320), gpu="h200", amp="bf16", select=["persistent-kernels"]
    )
    # Under autocast torch.nn's layers do not return the region's element type, and nothing hides that here.
    assert type(model) is nn.GRU
    assert "in its own precision" in plan.refused[0].reason


def test_layers_that_do_more_are_refused() -> None:
    class Own(nn.LSTM):
        pass

    for layer in (Own(32, 320), parametrizations.weight_norm(nn.LSTM(32, 320), "weight_hh_l0")):
        kind = type(layer)
        _, plan = planned(layer)
        assert not plan.fixes
        assert plan.refused
        assert type(layer) is kind


def test_layers_of_tilefit_stay() -> None:
    _, plan = planned(tilefit.nn.GRU(32, 320))
    assert not plan.fixes
    assert not plan.refused


def test_without_what_the_kernels_need_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """There cuDNN would run the layers all the same."""
    monkeypatch.setattr(persistent_layers, "has_bindings", lambda: False)
    assert planned(nn.GRU(32, 320))[1].fixes  # a plan for another machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RefusedError, match="cuda-bindings"):
        persistent_layers.persistent(("layer",)).apply(Run(Tagger(nn.GRU(32, 320)), ()))
