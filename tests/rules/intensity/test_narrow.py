"""INT003."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from whatif import findings, saved_s


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, or without."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.full = nn.Linear(2048, 2048, bias=False)
        self.down = nn.Linear(2048, rank, bias=False) if rank else None
        self.up = nn.Linear(rank, 2048, bias=False) if rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.full(x)
        return y if self.down is None or self.up is None else y + 2.0 * self.up(self.down(x))


X = torch.empty(8192, 2048, device="meta", dtype=torch.bfloat16)


def test_an_adapter_costs_what_the_merged_layer_saves() -> None:
    adapted = capture(Adapted(16).bfloat16(), X, train=False)
    merged = capture(Adapted(0).bfloat16(), X, train=False)
    (finding,) = findings(adapted, "INT003")
    assert finding.gain_s == pytest.approx(saved_s(adapted, merged), rel=0.02)
    assert "merge_and_unload" in finding.fix


def test_training_needs_its_adapters() -> None:
    assert not findings(capture(Adapted(16).bfloat16(), X, train=True), "INT003", min_gain=0)


def test_an_activation_between_keeps_the_pair_apart() -> None:
    pair = nn.Sequential(nn.Linear(2048, 16, bias=False), nn.ReLU(), nn.Linear(16, 2048, bias=False))
    assert not findings(capture(pair.bfloat16(), X, train=False), "INT003", min_gain=0)


def test_a_wide_middle_is_healthy() -> None:
    pair = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 2048, bias=False))
    assert not findings(capture(pair.bfloat16(), X, train=False), "INT003", min_gain=0)
