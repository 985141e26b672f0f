"""INT003."""

from __future__ import annotations

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
