"""A small language model as people write it: what the guide checks, fixes and sweeps.

tilefit check examples/train.py:build --gpu h200 --amp bf16
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a SwiGLU layer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Activations [batch, sequence, width] in and out."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Predicts the next token."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64, hidden) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of int64[batch, sequence]."""
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def build(layers: int = 8, hidden: int = 2730) -> tuple[nn.Module, Tensor]:
    """The model, its hidden layers 8 / 3 as wide as the others, and 8 sequences of 1024 tokens."""
    model = LanguageModel(vocabulary=32000, width=1024, hidden=hidden, layers=layers)
    return model, torch.zeros(8, 1024, dtype=torch.int64)


def padded() -> tuple[nn.Module, Tensor]:
    """The same with hidden layers of a multiple of 64."""
    return build(hidden=2752)
