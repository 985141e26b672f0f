"""What a changed module takes for granted: whatever its ``forward`` reads is as it was."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilefit.fixes.changes.assumed import Assumed

SETTINGS = {"scale": 1.0}
CONFIG = SimpleNamespace(scale=1.0)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS["scale"] * CONFIG.scale


class Own(nn.Module):
    """Reads attributes, what they hold, methods, functions of this file and of PyTorch, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.flag, self.sizes, self.table = True, [1, 2], torch.arange(3.0)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.again(scaled(self.layer(x))) for _ in self.sizes]
        return sum(made) + self.table[0] if self.flag else made[0]


Change = Callable[[Any, pytest.MonkeyPatch], object]
CHANGES: list[Change] = [
    lambda m, _: setattr(m, "flag", False),
    lambda m, _: m.sizes.append(3),
    lambda m, _: setattr(m, "table", torch.arange(3.0)),
    lambda m, _: m.add_module("other", nn.ReLU()),
    lambda m, patch: patch.setitem(SETTINGS, "scale", 2.0),
    lambda m, patch: patch.setattr(CONFIG, "scale", 2.0),
    lambda m, patch: patch.setattr(sys.modules[__name__], "scaled", torch.sigmoid),
    lambda m, patch: patch.setattr(F, "relu", torch.sigmoid),
    lambda m, patch: patch.setattr(Own, "again", lambda self, x: x),
    lambda m, patch: patch.setattr(Own, "forward", lambda self, x: x),
    lambda m, _: setattr(m, "__class__", type("Other", (Own,), {"again": lambda self, x: x})),
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_read_is_as_it_was(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Own()
    assumed = Assumed(module)
    with torch.no_grad():
        module(torch.ones(2, 4))
        module.layer.weight.add_(1.0)  # a step of training is no such change
    module.eval()
    assert assumed.holds(module)
    change(module, monkeypatch)
    assert not assumed.holds(module)


@pytest.mark.parametrize("of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_it_goes_with_copies_of_the_module(of: Callable[[Any], Any]) -> None:
    module, assumed = of((module := Own(), Assumed(module)))
    assert assumed.holds(module)
    module.sizes.append(3)
    assert not assumed.holds(module)


def test_of_pytorchs_own_modules_what_others_note_there_does_not_count() -> None:
    module: Any = nn.Linear(4, 4)
    assumed = Assumed(module)
    module.note, module.out_features = "mine", 4
    assert assumed.holds(module)
    module.out_features = 3
    assert not assumed.holds(module)
