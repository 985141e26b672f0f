"""Small models in two versions: as people write them, and as a rule would have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Self-attention; ``merged`` projections, ``fused`` attention."""

    def __init__(
        self, width: int = 1024, heads: int = 16, *, merged: bool = False, fused: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.merged, self.fused = heads, merged, fused
        if merged:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q = nn.Linear(width, width)
            self.k = nn.Linear(width, width)
            self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.merged else (self.q(x), self.k(x), self.v(x))
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
            y = F.softmax(scores, -1) @ v
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Normalisation, attention, residual; MLP."""

    def __init__(self, width: int = 1024, **options: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, **options)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, head, cross-entropy."""

    def __init__(self, vocabulary: int = 32000, width: int = 1024, layers: int = 2, **options: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Loop(nn.Module):
    """A recurrent layer, or its cell in a Python loop."""

    def __init__(self, layer: type[nn.RNNBase], width: int = 256, *, looped: bool = True) -> None:
        super().__init__()
        self.looped = looped
        cells = {nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell, nn.RNN: nn.RNNCell}
        self.body = cells[layer](width, width) if looped else layer(width, width)
        self.norm: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.looped:
            return self.body(x)[0]
        is_lstm = isinstance(self.body, nn.LSTMCell)
        state = x.new_zeros(x.shape[1], x.shape[2])
        states = (state, state) if is_lstm else state
        outputs = []
        for step in x:
            states = self.body(step, states)
            hidden = self.norm(states[0] if is_lstm else states)
            states = (hidden, states[1]) if is_lstm else hidden
            outputs.append(hidden)
        return torch.stack(outputs)


def tokens(batch: int = 8, length: int = 1024) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)
