"""``flex_attention`` in a model, on shapes alone: the fused kernel over the blocks of its mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from capturing import captured, entries, rows
from tilefit.ops import Attention

_LEARNT = torch.zeros(512, device="meta")


@pytest.mark.parametrize(
    ("seen", "share"),
    [
        (lambda b, h, q, kv: q >= kv, 513 / 2 / 512),
        (lambda b, h, q, kv: q // 128 == kv // 128, 1 / 4),
        (lambda b, h, q, kv: (kv < 128) & (q < 384), 3 / 16),
        (lambda b, h, q, kv: _LEARNT[q] == _LEARNT[kv], 1),  # nobody knows
        (None, 1),
    ],
)
@pytest.mark.parametrize("function", [flex_attention, torch.compile(flex_attention)])
def test_the_blocks_of_the_mask_are_computed(
    seen: Callable[..., Any] | None, share: float, function: Callable[..., Any]
) -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.qkv(x).view(2, 512, 3, 4, 16).permute(2, 0, 3, 1, 4)
        blocks = seen and create_block_mask(seen, None, None, 512, 512, device=x.device)
        y: torch.Tensor = function(q, k, v, score_mod=lambda score, *at: score * 2, block_mask=blocks)
        return y

    step = captured(run, rows(2, 512, 64), parts={"qkv": nn.Linear(64, 192)}, amp="bf16")
    forward, backward = (entry.op for entry in entries(step, Attention))
    assert isinstance(forward, Attention)
    assert isinstance(backward, Attention)
    assert (forward.scores, forward.dtype) == (round(2 * 4 * 512 * 512 * share), "bf16")
    assert backward.scores == forward.scores
    assert any("flex_attention" in note for note in step.notes)


def test_afterwards_it_is_pytorchs_own() -> None:
    q = torch.randn(1, 1, 8, 4)
    captured(lambda m, x: flex_attention(x, x, x), rows(1, 1, 8, 4), train=False)
    torch.testing.assert_close(flex_attention(q, q, q), nn.functional.scaled_dot_product_attention(q, q, q))
