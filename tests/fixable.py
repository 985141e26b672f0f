"""The smallest models that each fix of a model changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from in_use import on_meta


def linear(*sizes: int, act: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers of these sizes, with ``act`` between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [act()] if layers else []
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)


def convolutions(norm: bool = True) -> nn.Sequential:
    """Two convolutions with an odd number of channels between them."""
    norms = [nn.BatchNorm2d(6)] if norm else []
    return nn.Sequential(
        nn.Conv2d(8, 6, 3, padding=1, bias=not norm), *norms, nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1)
    )


def encoder_layer() -> nn.Module:
    """PyTorch's own, of four heads of five."""
    return nn.TransformerEncoderLayer(20, 4, 32, dropout=0.0, batch_first=True, norm_first=True)


class Attention(nn.Module):
    """Self-attention by hand; ``keep`` says what happens to the attention weights."""

    def __init__(self, width: int = 16, heads: int = 2, keep: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.heads, self.keep = nn.Linear(width, 3 * width, bias=False), heads, keep
        self.dropout = nn.Dropout(dropout)
        self.weights: Any = None

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        return parts.permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        weights = self.dropout((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1))
        if self.keep == "detached":
            self.weights = weights.detach()
        elif self.keep == "class":
            self.weights = torch.is_tensor(weights) and isinstance(weights, torch.Tensor)
        elif self.keep:
            self.weights = weights
        y = (weights @ v).transpose(1, 2).reshape(x.shape)
        if self.keep == "gradient" and weights.requires_grad:
            weights.retain_grad()
        return y


class Masked(nn.Module):
    """Attention that is given its mask, and a cache of keys which it writes to."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.attention.split(x)
        if cache is not None:
            cache[:, :, : x.shape[1]].copy_(k)
            k = cache[:, :, : x.shape[1]]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).reshape(x.shape)


class Padded(nn.Module):
    """Attention with a mask of tokens that is expanded over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, x: torch.Tensor, keep: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        batch, length = keep.shape
        return self.inner(x, keep[:, None, :, None].expand(batch, 1, length, length), cache)


class PaddedAlone(Padded):
    """The same, with a mask of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        batch, length, _ = x.shape
        keep = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        return self.inner(x, keep[:, None, :, None].expand(batch, 1, length, length))


class WrittenGelu(nn.Module):
    """GELU as GPT-2 writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


class WrittenNorm(nn.Module):
    """Root-mean-square normalization in fp32; ``late`` casts before the weight."""

    def __init__(self, width: int = 64, late: bool = True) -> None:
        super().__init__()
        self.width, self.late, self.eps = width, late, 1e-6
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype) if self.late else (self.weight * h).to(x.dtype)

    def clone(self) -> nn.Module:
        return type(self)(self.width)


class Scorer(nn.Module):
    """Scores of an odd number of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


class Recurrent(nn.Module):
    """An LSTM, its outputs alone."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


@dataclass(frozen=True)
class Kind:
    """A model that one fix changes.

    Attributes:
        fix: Name of the fix.
        make: Makes the model.
        planned_on: Inputs of the plan.
        sizes: Of the real input, ``batch`` first.
        tokens: The input is a tensor of tokens.
        options: More of the plan's.
    """

    fix: str
    make: Callable[[], nn.Module]
    planned_on: Any
    sizes: tuple[int, ...]
    tokens: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def input(self, batch: int = 0) -> torch.Tensor:
        """A real one, random, the same every time."""
        sizes = (batch or self.sizes[0], *self.sizes[1:])
        generator = torch.Generator().manual_seed(2)
        if self.tokens:
            return torch.randint(0, 37, sizes, generator=generator)
        return torch.randn(sizes, generator=generator)


#: What images a plan is made on where convolutions are to count.
IMAGES = on_meta(4096, 8, 16, 16)
ROWS = on_meta(8, 16)

KINDS = {
    "pad-linear": Kind("pad-linear", lambda: linear(16, 13, 8), ROWS, (8, 16)),
    "pad-vocabulary": Kind(
        "pad-vocabulary", Scorer, torch.zeros(4, 8, dtype=torch.long), (4, 8), tokens=True
    ),
    "pad-channels": Kind("pad-channels", convolutions, IMAGES, (4, 8, 6, 6)),
    "channels-last": Kind("channels-last", convolutions, IMAGES, (4, 8, 6, 6)),
    "fuse-attention": Kind("fuse-attention", Attention, on_meta(2, 8, 16), (2, 8, 16)),
    "fit-heads": Kind("fit-heads", encoder_layer, on_meta(2, 8, 20), (2, 8, 20)),
    "contiguous-masks": Kind("contiguous-masks", PaddedAlone, on_meta(2, 8, 16), (2, 8, 16)),
    "compile-parts": Kind(
        "compile-parts",
        lambda: nn.Sequential(nn.Linear(64, 64), WrittenNorm(), nn.Linear(64, 64), WrittenGelu()),
        on_meta(1 << 18, 64),
        (8, 64),
        options={"min_gain": 0.01},
    ),
    "persistent-kernels": Kind("persistent-kernels", Recurrent, on_meta(4, 50, 256), (2, 3, 256)),
}
