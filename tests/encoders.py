"""An encoder that makes a mask in which nothing is masked, and gives it to every layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    """Attention by ``scaled_dot_product_attention``, with whatever mask it is given."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).flatten(-2))


class Encoder(nn.Module):
    """Layers of attention.

    ``mask``: ``"expanded"``: one column that is repeated, as bools; ``"contiguous"``: the same, copied;
    ``"none"``; ``"compiling"``: expanded when compiled, else none.
    """

    def __init__(
        self,
        mask: str = "expanded",
        *,
        width: int = 512,
        heads: int = 8,
        layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.mask = mask
        self.layers = nn.ModuleList(SelfAttention(width, heads, dropout) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask: Any = None
        if self.mask != "none" and (self.mask != "compiling" or torch.compiler.is_compiling()):
            batch, length = x.shape[:2]
            positions = torch.arange(length, device=x.device)
            mask = (positions >= 0)[None, None, :, None].expand(batch, 1, length, length)
            mask = mask.contiguous() if self.mask == "contiguous" else mask
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), mask)
        return x
