"""ALN006: head sizes, and attention written out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from builders import StepBuilder
from tilefit.capture import capture
from tilefit.cost import estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Attention
from tilefit.rules import get, run
from tilefit.rules.base import Context
from whatif import findings


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (16, 128)])
def test_head_sizes_the_kernels_are_made_for(heads: int, head_dim: int, h200: Gpu) -> None:
    b = StepBuilder(batch=16)
    b.attention("attn", heads, 2048, head_dim)
    assert run(b.step(), h200, select=["ALN"]) == []


def test_other_heads_keep_the_width(h200: Gpu) -> None:
    b = StepBuilder(batch=16)
    b.attention("attn", 32, 4096, 80)
    step = b.step()
    (proposal,) = get("ALN006").check(Context(step, h200, estimate_step(step, h200)))
    assert proposal.safety == "unsafe"
    assert proposal.change is not None
    for (entry,) in proposal.change.replace.values():
        assert isinstance(entry.op, Attention)
        assert entry.op.num_heads * entry.op.head_dim == 2560
        assert entry.op.head_dim in (64, 128)


class Products(nn.Module):
    """A product over 1001 positions, of scores or of something else."""

    def __init__(self, weights: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(1024, 1024), weights

    def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.weights(a) @ self.layer(x)


@pytest.mark.parametrize("is_attention", [True, False])
def test_what_is_no_attention_is_not_called_so(is_attention: bool) -> None:
    inputs = (torch.empty(64, 1001, 1001, device="meta"), torch.empty(64, 1001, 1024, device="meta"))
    weights = partial(torch.softmax, dim=-1) if is_attention else torch.relu
    (finding,) = findings(capture(Products(weights), inputs, amp="bf16"), "ALN006")
    assert ("attention" in finding.message) == is_attention
    assert ("F.scaled_dot_product_attention" in finding.fix) == is_attention
    assert "1001 to 1024" in finding.fix


class ByHand(nn.Module):
    """Attention whose softmax is a module of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.softmax = heads, nn.Linear(width, 3 * width), nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.softmax(q @ k.mT / q.shape[-1] ** 0.5) @ v


@pytest.mark.parametrize(
    ("positions", "width", "advice"),
    [
        (577, 768, r"pad 577 to \d+ inside the attention and mask the added positions"),
        (512, 1200, r"pad 100 to \d+ inside the attention, with zeros"),
    ],
)
def test_added_positions_are_masked_and_features_are_zeros(positions: int, width: int, advice: str) -> None:
    step = capture(nn.Sequential(ByHand(width, 12)), torch.empty(64, positions, width), amp="bf16")
    (finding,) = findings(step, "ALN006")
    assert re.search(advice, finding.fix)
    assert "scaled_dot_product_attention" in finding.fix
