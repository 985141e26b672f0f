"""Models whose compiled steps were predicted before they were measured, after those of ``later_models.py``: a
Fourier operator, polynomials, tables, poses, styles, linear attention, sound over time. Each function returns
a model and its inputs, each model its loss.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


class Operator(nn.Module):
    """Fields to fields: low frequencies are mixed by complex matrices, all places by 1x1 convolutions."""

    def __init__(self, width: int = 48, modes: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.enter = nn.Conv2d(3, width, 1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width) for _ in range(layers)
        )
        self.beside = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.leave = nn.Sequential(nn.Conv2d(width, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))

    def forward(self, field: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        x, modes = self.enter(field), self.modes
        for weight, beside in zip(self.weights, self.beside, strict=True):
            spectrum = torch.fft.rfft2(x.float())
            mixed = torch.zeros_like(spectrum)
            low, high = torch.view_as_complex(weight)
            mixed[:, :, :modes, :modes] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :modes, :modes], low)
            mixed[:, :, -modes:, :modes] = torch.einsum(
                "bixy,ioxy->boxy", spectrum[:, :, -modes:, :modes], high
            )
            x = F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + beside(x))
        return F.mse_loss(self.leave(x).float(), after)


def operator() -> Made:
    """16 fields of 128 x 128."""
    return Operator(), (torch.randn(16, 3, 128, 128), torch.randn(16, 1, 128, 128))


class Polynomials(nn.Module):
    """Layers of learnt polynomials of each input (Chebyshev's, by their recurrence)."""

    def __init__(self, widths: tuple[int, ...] = (256, 256, 256, 32), degree: int = 4) -> None:
        super().__init__()
        self.degree = degree
        self.parts = nn.ModuleList(nn.Linear(a * (degree + 1), b, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(a) for a in widths[:-1])

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for part, norm in zip(self.parts, self.norms, strict=True):
            x = norm(x).tanh()
            found = [torch.ones_like(x), x]
            for _ in range(self.degree - 1):
                found.append(2 * x * found[-1] - found[-2])
            x = part(torch.stack(found, -1).flatten(-2))
        return F.smooth_l1_loss(x.float(), wanted)


def polynomials() -> Made:
    """Batch 65,536."""
    return Polynomials(), (torch.randn(65536, 256), torch.randn(65536, 32))


class Table(nn.Module):
    """Rows of a table: numbers and categories become vectors, which look at each other."""

    def __init__(self, numbers: int = 24, fields: int = 8, width: int = 192, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(numbers, width))
        self.shift = nn.Parameter(torch.randn(numbers, width))
        self.words = nn.Embedding(1000 * fields, width)
        self.register_buffer("starts", torch.arange(fields) * 1000)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, 512) for _ in range(layers))
        self.back = nn.ModuleList(nn.Linear(256, width) for _ in range(layers))
        self.leave = nn.Linear(width, 2)

    def forward(self, numbers: torch.Tensor, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = numbers[..., None] * self.scale + self.shift
        x = torch.cat([self.first.expand(len(x), -1, -1), x, self.words(words + self.starts)], 1)
        for i, (mix, out, gate, back) in enumerate(
            zip(self.mix, self.out, self.gate, self.back, strict=True)
        ):
            parts = mix(self.norms[2 * i](x)).unflatten(-1, (8, -1)).transpose(1, 2).chunk(3, -1)
            y = F.scaled_dot_product_attention(*parts)
            x = x + F.dropout(out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
            part, open_ = gate(self.norms[2 * i + 1](x)).chunk(2, -1)
            x = x + F.dropout(back(part * F.relu(open_)), 0.1, self.training)
        return F.cross_entropy(self.leave(self.norms[-1](x[:, 0]).relu()), labels)


def table() -> Made:
    """Batch 4096 of 24 numbers and 8 categories."""
    return Table(), (
        torch.randn(4096, 24),
        torch.randint(0, 1000, (4096, 8)),
        torch.randint(0, 2, (4096,)),
    )


class Pose(nn.Module):
    """Joints of persons: bottlenecks down, transposed convolutions up to maps, the places by soft maxima."""

    def __init__(self, width: int = 32, joints: int = 17) -> None:
        super().__init__()

        def block(a: int, b: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                *(nn.Conv2d(a, b // 2, 1, bias=False), nn.BatchNorm2d(b // 2), nn.ReLU()),
                nn.Conv2d(b // 2, b // 2, 3, stride, 1, bias=False),
                *(nn.BatchNorm2d(b // 2), nn.ReLU(), nn.Conv2d(b // 2, b, 1), nn.BatchNorm2d(b)),
            )

        self.enter = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width * 2**i for i in range(5)]
        self.down = nn.ModuleList(block(a, b, 2) for a, b in pairwise(sizes))
        self.beside = nn.ModuleList(nn.Conv2d(a, b, 1, 2) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1))
            for a, b in pairwise((sizes[-1], 128, 128, 128))
        )
        self.leave = nn.Conv2d(128, joints, 1)

    def forward(self, images: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        for down, beside in zip(self.down, self.beside, strict=True):
            x = F.relu(down(x) + beside(x))
        for up in self.up:
            x = up(x)
        maps = self.leave(x).float()
        chance = maps.flatten(2).softmax(-1).view_as(maps)
        rows, columns = (torch.linspace(0, 1, size, device=x.device) for size in maps.shape[-2:])
        found = torch.stack([(chance.sum(2) * columns).sum(-1), (chance.sum(3) * rows).sum(-1)], -1)
        return F.l1_loss(found, places) + 1e-4 * maps.square().mean()


def pose() -> Made:
    """64 images of 256 x 192."""
    return Pose(), (torch.randn(64, 3, 256, 192), torch.rand(64, 17, 2))


class Style(nn.Module):
    """A picture in another's style: instance norms, reflected borders, and Gram matrices of what is seen."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()

        def layer(a: int, b: int, size: int, stride: int = 1) -> nn.Sequential:
            conv = nn.Conv2d(a, b, size, stride, size // 2, padding_mode="reflect")
            return nn.Sequential(conv, nn.InstanceNorm2d(b, affine=True), nn.ReLU())

        self.down = nn.Sequential(
            layer(3, width, 9), layer(width, 2 * width, 3, 2), layer(2 * width, 4 * width, 3, 2)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(layer(4 * width, 4 * width, 3), layer(4 * width, 4 * width, 3))
            for _ in range(blocks)
        )
        self.up = nn.ModuleList(layer(a * width, b * width, 3) for a, b in ((4, 2), (2, 1)))
        self.leave = nn.Conv2d(width, 3, 9, padding=4)
        self.see = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise((3, 32, 64, 128)))
        self.see.requires_grad_(False)

    def forward(self, images: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        x = self.down(images)
        for block in self.blocks:
            x = x + block(x)
        for up in self.up:
            x = up(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        made, seen, like = self.leave(x).sigmoid(), images, style
        total: Any = 0.0
        for conv in self.see:
            made, seen, like = (F.max_pool2d(F.relu(conv(each)), 2) for each in (made, seen, like))
            grams = [each.flatten(2) @ each.flatten(2).mT / each[0].numel() for each in (made, like)]
            total = total + F.mse_loss(made.float(), seen.float()) + 1e3 * F.mse_loss(*grams)
        return total


def style() -> Made:
    """8 pictures of 256 x 256."""
    return Style(), (torch.rand(8, 3, 256, 256), torch.rand(8, 3, 256, 256))


class Kernels(nn.Module):
    """A classifier of long sequences whose attention is a product of features, not a softmax."""

    def __init__(self, width: int = 256, layers: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.turn = nn.Parameter(torch.randn(1, 4096, width) * 0.02)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.leave = nn.Linear(width, 10)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) + self.turn
        for i, (mix, out, wide, narrow) in enumerate(
            zip(self.mix, self.out, self.wide, self.narrow, strict=True)
        ):
            query, key, value = mix(self.norms[2 * i](x)).unflatten(-1, (8, -1)).chunk(3, -1)
            query, key = F.elu(query) + 1, F.elu(key) + 1
            state = torch.einsum("bshd,bshe->bhde", key, value)
            below = torch.einsum("bshd,bhd->bsh", query, key.sum(1)) + 1e-6
            y = torch.einsum("bshd,bhde->bshe", query, state) / below[..., None]
            x = x + out(y.flatten(2))
            x = x + narrow(F.silu(wide(self.norms[2 * i + 1](x))))
        return F.cross_entropy(self.leave(x.mean(1)), labels)


def kernels() -> Made:
    """16 sequences of 4096."""
    return Kernels(), (torch.randint(0, 256, (16, 4096)), torch.randint(0, 10, (16,)))


class Temporal(nn.Module):
    """Series: gated convolutions of growing dilation, whose skips are summed up (as in WaveNet)."""

    def __init__(self, width: int = 64, layers: int = 10, levels: int = 256) -> None:
        super().__init__()
        self.enter = nn.Embedding(levels, width)
        self.gated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2 ** (i % 10)) for i in range(layers)
        )
        self.skips = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.leave = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 128, 1), nn.ReLU(), nn.Conv1d(128, levels, 1))

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        x = self.enter(series[:, :-1]).transpose(1, 2)
        total: Any = 0.0
        for gated, skip in zip(self.gated, self.skips, strict=True):
            signal, open_ = gated(F.pad(x, (gated.dilation[0], 0))).chunk(2, 1)
            part, aside = skip(signal.tanh() * open_.sigmoid()).chunk(2, 1)
            x, total = x + part, total + aside
        return F.cross_entropy(self.leave(total), series[:, 1:])


def temporal() -> Made:
    """8 series of 8193."""
    return Temporal(), (torch.randint(0, 256, (8, 8193)),)
