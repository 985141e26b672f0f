"""Models of many equal parts, whose compiled steps the host limits: what one part takes of it.

Kernels that cannot be fused, calls of libraries, parameters, inputs, modules, breaks of the graph, operations
left to Python: many of one of them beside few of the others, in two numbers. ``compiled_steps.py`` measures
them among its models; they tell what launching is from what it launches, and both from what is paid for a
parameter, which the steps of real models do not settle. Another few are of operations whose time on the GPU
no model settles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]
WIDTH = 64


class Kernels(nn.Module):
    """Softmaxes over rows and columns in turn, whose sums nothing can be fused across."""

    def __init__(self, count: int, scaled: bool) -> None:
        super().__init__()
        self.count = count
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(count if scaled else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scales[0]
        for index in range(self.count):
            x = F.softmax(x * self.scales[index] if index < len(self.scales) else x, dim=index % 2)
        return x.square().sum()


class Parameters(nn.Module):
    """Parameters, or inputs that learn nothing, which few kernels read."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(count))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        count = max(len(self.all), len(inputs))
        pairs = ((self.all[i % len(self.all)], inputs[i % len(inputs)]) for i in range(count))
        return torch.stack([(parameter * x).sin() for parameter, x in pairs]).sum()


class Modules(nn.Module):
    """Modules in modules, which the guards look at, and that do nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Identity() for _ in range(8))) for _ in range(count // 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.float().mean()


class Chain(nn.Module):
    """One layer after another, or one over and over."""

    def __init__(self, make: Callable[[], nn.Module], count: int, times: int = 1) -> None:
        super().__init__()
        self.times = times
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return x.float().square().mean()


class Attentions(nn.Module):
    """Attention of a sequence to itself, over and over."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.enter = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x).unflatten(-1, (4, WIDTH)).transpose(1, 2)
        for _ in range(self.count):
            x = F.scaled_dot_product_attention(x, x, x)
        return x.float().mean()


class Written(nn.Module):
    """Sums of four products each, of one function of what was before, or of four: as many kernels, which
    write one tensor or four."""

    def __init__(self, count: int, apart: bool) -> None:
        super().__init__()
        functions = (torch.sin, torch.cos, torch.tanh, torch.sigmoid)
        self.functions = functions if apart else 4 * functions[:1]
        self.layers = nn.ModuleList(nn.ModuleList(_linear() for _ in range(4)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layers in self.layers:
            x = sum(layer(f(x)) for layer, f in zip(layers, self.functions, strict=True))
        return x.float().square().mean()


@torch.compiler.disable
def in_python(x: torch.Tensor, count: int) -> torch.Tensor:
    """Operations that the compiler does not see."""
    for _ in range(count):
        x = x * 1.0
    return x


class Broken(nn.Module):
    """Layers with breaks of the graph between them, and operations in Python there."""

    def __init__(self, count: int, between: int) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = in_python(layer(x), self.between)
        return x.float().square().mean()


class Scans(nn.Module):
    """Sums along an axis so far, of a layer's result."""

    def __init__(self, count: int, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).float().cumsum(self.axis) * 0.01
        return x.square().mean()


class Near(nn.Module):
    """The nearest of all to each point, over and over."""

    def __init__(self, count: int, nearest: int) -> None:
        super().__init__()
        self.nearest = nearest
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).float()
            near = torch.cdist(x, x).topk(self.nearest, largest=False)
            x = x * near.values.mean(-1, keepdim=True)
        return x.square().mean()


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def _square() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH)


def kernels() -> Made:
    return Kernels(64, True), (_square(),)


def plain_kernels() -> Made:
    return Kernels(64, False), (_square(),)


def many_kernels() -> Made:
    return Kernels(192, False), (_square(),)


def parameters() -> Made:
    return Parameters(64), (_square(),)


def many_parameters() -> Made:
    return Parameters(256), (_square(),)


def inputs() -> Made:
    return Parameters(1), tuple(_square() for _ in range(64))


def many_inputs() -> Made:
    return Parameters(1), tuple(_square() for _ in range(256))


def modules() -> Made:
    return Modules(64), (_square(),)


def many_modules() -> Made:
    return Modules(512), (_square(),)


def written() -> Made:
    return Written(16, False), (torch.randn(256, WIDTH),)


def written_apart() -> Made:
    return Written(16, True), (torch.randn(256, WIDTH),)


def products() -> Made:
    return Chain(_linear, 64), (torch.randn(256, WIDTH),)


def shared_products() -> Made:
    return Chain(_linear, 1, 128), (torch.randn(256, WIDTH),)


def convolutions() -> Made:
    return Chain(lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), 64), (
        torch.randn(4, WIDTH, 8, 8),
    )


def shared_convolutions() -> Made:
    return Chain(lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), 1, 64), (
        torch.randn(4, WIDTH, 8, 8),
    )


def depthwise() -> Made:
    conv = lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)  # noqa: E731
    return Chain(conv, 1, 64), (torch.randn(4, WIDTH, 8, 8),)


def convolutions_1d() -> Made:
    return Chain(lambda: nn.Conv1d(256, 256, 3, padding=1), 8), (torch.randn(16, 256, 4096),)


def dilated_1d() -> Made:
    return Chain(lambda: nn.Conv1d(256, 256, 3, padding=8, dilation=8), 8), (torch.randn(16, 256, 4096),)


def attentions() -> Made:
    return Attentions(32), (torch.randn(2, WIDTH, WIDTH),)


def breaks() -> Made:
    return Broken(32, 0), (torch.randn(256, WIDTH),)


def left() -> Made:
    return Broken(4, 32), (torch.randn(256, WIDTH),)


def scans() -> Made:
    return Scans(4, 1), (torch.randn(16, 1024, 512),)


def scans_of_rows() -> Made:
    return Scans(4, 2), (torch.randn(16, 1024, 512),)


def long_scans() -> Made:
    return Scans(4, 1), (torch.randn(4, 8192, 512),)


def near() -> Made:
    return Near(4, 16), (torch.randn(16, 1024, 64),)


def nearer() -> Made:
    return Near(4, 4), (torch.randn(4, 4096, 64),)
