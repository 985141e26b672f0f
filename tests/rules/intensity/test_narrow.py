"""INT003."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from whatif import findings

X = torch.empty(8192, 2048, device="meta", dtype=torch.bfloat16)


def test_training_needs_its_adapters() -> None:
    pair = nn.Sequential(nn.Linear(2048, 16, bias=False), nn.Linear(16, 32, bias=False)).bfloat16()
    assert findings(capture(pair, X, train=False), "INT003")
    assert not findings(capture(pair, X, train=True), "INT003", min_gain=0)


def test_an_activation_between_keeps_the_pair_apart() -> None:
    pair = nn.Sequential(nn.Linear(2048, 16, bias=False), nn.ReLU(), nn.Linear(16, 2048, bias=False))
    assert not findings(capture(pair.bfloat16(), X, train=False), "INT003", min_gain=0)


def test_a_wide_middle_is_healthy() -> None:
    pair = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 2048, bias=False))
    assert not findings(capture(pair.bfloat16(), X, train=False), "INT003", min_gain=0)


@pytest.mark.parametrize(
    ("between", "out"),
    [(lambda z: z * z, lambda y, z: y), (lambda z: z, lambda y, z: (y, z))],
    ids=["squared", "returned"],
)
def test_a_middle_that_is_needed_keeps_the_pair_apart(
    between: Callable[[torch.Tensor], torch.Tensor], out: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(512, 64, bias=False), nn.Linear(64, 512, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            z = self.down(x)
            return out(self.up(between(z)), z)

    step = capture(Encoded().bfloat16(), X[:, :512], train=False)
    assert not findings(step, "INT003", min_gain=0)


@pytest.mark.parametrize("amp", ["bf16", ""])
def test_an_adapter_is_merged_with_the_layer_of_its_own_input(amp: str) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.full = nn.Linear(512, 512, bias=False)
            self.down, self.up = nn.Linear(512, 64, bias=False), nn.Linear(64, 512, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.full(x) + self.up(self.down(y))

    both = torch.empty(2, 8192, 512, device="meta")
    (merged,) = findings(capture(Adapted(), (both[0], both[0]), amp=amp, train=False), "INT003")
    assert "merge_and_unload" in merged.fix
    for other in findings(capture(Adapted(), (both[0], both[1]), amp=amp, train=False), "INT003"):
        assert "merge_and_unload" not in other.fix
