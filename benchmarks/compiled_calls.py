"""Models of many equal calls, whose compiled steps the host limits: what one call takes of it.

Convolutions, products, attention and generated kernels that cannot be fused, with a parameter each but for
attention. ``compiled_steps.py`` measures them among its models; they tell what launching is from what it
launches, which the steps of real models do not settle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]
LAYERS = 64
WIDTH = 64


class Kernels(nn.Module):
    """Softmaxes over rows and columns in turn, whose sums nothing can be fused across."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, scale in enumerate(self.scales):
            x = F.softmax(x * scale, dim=index % 2)
        return x.mean()


def kernels() -> Made:
    """A square."""
    return Kernels(), (torch.randn(WIDTH, WIDTH),)


class Chain(nn.Module):
    """One layer after another."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made.float().mean()


def products() -> Made:
    """Small linear layers."""
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return Chain(layers), (torch.randn(256, WIDTH),)


def convolutions() -> Made:
    """Small convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(LAYERS)]
    return Chain(layers), (torch.randn(4, WIDTH, 8, 8),)


class Attentions(nn.Module):
    """Attention of a sequence to itself, over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x).unflatten(-1, (4, WIDTH)).transpose(1, 2)
        for _ in range(LAYERS // 2):
            x = F.scaled_dot_product_attention(x, x, x)
        return x.float().mean()


def attentions() -> Made:
    """2 sequences of 64."""
    return Attentions(), (torch.randn(2, WIDTH, WIDTH),)
