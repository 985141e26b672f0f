"""Models whose compiled steps were predicted before they were measured, after those of ``fresh_models.py``
had set the fixed part of a step: speech (Conformer), denoising (NAFNet), causal convolutions with weight norm
(TCN), clicks (deep interest network), two views without negatives (Barlow Twins), a deep variational
autoencoder, graphs as sequences (Graphormer), a diffusion transformer, a masked autoencoder, a vocoder
(HiFi-GAN), forecasts by patches (PatchTST), a decision transformer, one-stage detection (YOLO), graph
isomorphism networks; and later pictures out of sketches (pix2pix), LightGCN, Mamba 2, TimeSformer, ESRGAN,
TSMixer, a diffusion policy, PointNet, wav2vec 2.0, EGNN. Each function returns a model and its inputs, each
model its loss.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


class Attention(nn.Module):
    """Self-attention of several heads, with a bias of the scores or none."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, bias, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp(width: int, hidden: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, width),
        nn.Dropout(dropout),
    )


class Encoder(nn.Module):
    """A pre-norm transformer."""

    def __init__(
        self, width: int, heads: int, layers: int, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.attention = nn.ModuleList(Attention(width, heads, causal) for _ in range(layers))
        self.mlps = nn.ModuleList(mlp(width, 4 * width, dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        for i, (attention, feed) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x), bias)
            x = x + feed(self.norms[2 * i + 1](x))
        return self.norms[-1](x)


class ConformerBlock(nn.Module):
    """Half a feed-forward layer, attention, a depthwise convolution over time, the other half."""

    def __init__(self, width: int, heads: int, size: int = 31) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.feed = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1)),
                *(nn.Linear(4 * width, width), nn.Dropout(0.1)),
            )
            for _ in range(2)
        )
        self.attention = Attention(width, heads)
        self.convolve = nn.Sequential(
            *(nn.Conv1d(width, 2 * width, 1), nn.GLU(1)),
            nn.Conv1d(width, width, size, padding=size // 2, groups=width, bias=False),
            *(nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1), nn.Dropout(0.1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.feed[0](self.norms[0](x))
        x = x + self.attention(self.norms[1](x))
        x = x + self.convolve(self.norms[2](x).transpose(1, 2)).transpose(1, 2)
        x = x + 0.5 * self.feed[1](self.norms[3](x))
        return self.norms[4](x)


class Conformer(nn.Module):
    """Speech to units: frames are taken together by strided convolutions, then blocks."""

    def __init__(self, width: int = 256, layers: int = 6, units: int = 1000) -> None:
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU()
        )
        self.enter = nn.Linear(64 * 20, width)
        self.blocks = nn.Sequential(*(ConformerBlock(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, units)

    def forward(self, sound: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        x = self.subsample(sound[:, None]).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(self.blocks(self.enter(x))).flatten(0, 1), units.flatten())


def conformer() -> Made:
    """32 stretches of 1024 frames of 80 bands."""
    return Conformer(), (torch.randn(32, 1024, 80), torch.randint(0, 1000, (32, 256)))


class ChannelNorm(nn.Module):
    """A layer norm over the channels of images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = x - x.mean(1, keepdim=True)
        y = apart * torch.rsqrt(apart.square().mean(1, keepdim=True) + 1e-6)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


class NafBlock(nn.Module):
    """Gates are products of halves; channels are weighed by their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = ChannelNorm(width), ChannelNorm(width)
        self.enter = nn.Conv2d(width, 2 * width, 1)
        self.depth = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.weigh = nn.Conv2d(width, width, 1)
        self.leave = nn.Conv2d(width, width, 1)
        self.wide, self.narrow = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, width, 1)
        self.beta = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.gamma = nn.Parameter(torch.zeros(1, width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.depth(self.enter(self.first(x))).chunk(2, 1)
        y = one * other
        x = x + self.leave(y * self.weigh(y.mean((2, 3), keepdim=True))) * self.beta
        one, other = self.wide(self.second(x)).chunk(2, 1)
        return x + self.narrow(one * other) * self.gamma


class Naf(nn.Module):
    """A U-Net that takes noise from photographs."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        sizes = [width * 2**i for i in range(4)]
        self.encode = nn.ModuleList(NafBlock(size) for size in sizes[:-1])
        self.down = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in pairwise(sizes))
        self.middle = nn.Sequential(NafBlock(sizes[-1]), NafBlock(sizes[-1]))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(b, 2 * b, 1, bias=False), nn.PixelShuffle(2)) for b in reversed(sizes[1:])
        )
        self.decode = nn.ModuleList(NafBlock(size) for size in reversed(sizes[:-1]))

    def forward(self, noisy: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        x, seen = self.enter(noisy), []
        for block, down in zip(self.encode, self.down, strict=True):
            x = block(x)
            seen.append(x)
            x = down(x)
        x = self.middle(x)
        for up, block in zip(self.up, self.decode, strict=True):
            x = block(up(x) + seen.pop())
        error = (noisy + self.leave(x) - clean).float().square().mean((1, 2, 3))
        return 10 * torch.log10(error + 1e-8).mean()


def naf() -> Made:
    """16 patches of 192 x 192."""
    return Naf(), (torch.rand(16, 3, 192, 192), torch.rand(16, 3, 192, 192))


class CausalBlock(nn.Module):
    """Two dilated convolutions whose weights are normalised, of which the future is cut off."""

    def __init__(self, inputs: int, width: int, dilation: int, size: int = 3) -> None:
        super().__init__()
        self.cut = (size - 1) * dilation
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(
            norm(nn.Conv1d(a, width, size, padding=self.cut, dilation=dilation)) for a in (inputs, width)
        )
        self.beside = nn.Conv1d(inputs, width, 1) if inputs != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for conv in self.convs:
            y = F.dropout(F.relu(conv(y)[..., : -self.cut]), 0.2, self.training)
        return F.relu(y + self.beside(x))


class Tcn(nn.Module):
    """Music: which of 88 notes come next."""

    def __init__(self, notes: int = 88, width: int = 150, layers: int = 6) -> None:
        super().__init__()
        widths = [notes] + [width] * layers
        self.blocks = nn.Sequential(*(CausalBlock(a, b, 2**i) for i, (a, b) in enumerate(pairwise(widths))))
        self.head = nn.Linear(width, notes)

    def forward(self, music: torch.Tensor) -> torch.Tensor:
        x = self.head(self.blocks(music[:, :-1].transpose(1, 2)).transpose(1, 2))
        return F.binary_cross_entropy_with_logits(x.float(), music[:, 1:])


def tcn() -> Made:
    """64 pieces of 512 moments."""
    return Tcn(), (torch.rand(64, 513, 88).round(),)


class Dice(nn.Module):
    """An activation whose gate is a batch norm's sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.norm(x.flatten(0, -2)).view_as(x).sigmoid()
        return gate * x + (1 - gate) * self.alpha * x


class Interest(nn.Module):
    """Clicks: what a user did before is weighed by a network of it and of what is shown (DIN)."""

    def __init__(self, items: int = 100_000, kinds: int = 1000, size: int = 32) -> None:
        super().__init__()
        self.items, self.kinds = nn.Embedding(items, size), nn.Embedding(kinds, size)
        self.weigh = nn.Sequential(
            nn.Linear(8 * size, 80), Dice(80), nn.Linear(80, 40), Dice(40), nn.Linear(40, 1)
        )
        self.deep = nn.Sequential(
            nn.Linear(6 * size, 200), Dice(200), nn.Linear(200, 80), Dice(80), nn.Linear(80, 1)
        )

    def forward(
        self,
        item: torch.Tensor,
        kind: torch.Tensor,
        items: torch.Tensor,
        kinds: torch.Tensor,
        length: torch.Tensor,
        clicked: torch.Tensor,
    ) -> torch.Tensor:
        shown = torch.cat([self.items(item), self.kinds(kind)], -1)
        past = torch.cat([self.items(items), self.kinds(kinds)], -1)
        now = shown[:, None].expand_as(past)
        weight = self.weigh(torch.cat([now, past, now - past, now * past], -1))[..., 0]
        there = torch.arange(past.shape[1], device=length.device) < length[:, None]
        wanted = (weight.masked_fill(~there, 0.0)[:, None] @ past)[:, 0]
        said = self.deep(torch.cat([shown, wanted, shown * wanted], -1))[:, 0]
        return F.binary_cross_entropy_with_logits(said.float(), clicked)


def interest() -> Made:
    """4096 users with 50 items each."""
    return Interest(), (
        *(torch.randint(0, 100_000, (4096,)), torch.randint(0, 1000, (4096,))),
        *(torch.randint(0, 100_000, (4096, 50)), torch.randint(0, 1000, (4096, 50))),
        *(torch.randint(1, 51, (4096,)), torch.rand(4096).round()),
    )


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or inputs != width:
            self.beside = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(self.first(x)) + self.beside(x))


class Barlow(nn.Module):
    """Two views of each image: their features are to correlate one by one, and not otherwise."""

    def __init__(self, size: int = 1024) -> None:
        super().__init__()
        shapes = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 512, 2))
        self.see = nn.Sequential(
            *(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
            *(BasicBlock(*shape) for shape in shapes),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.project = nn.Sequential(
            *(nn.Linear(512, size, bias=False), nn.BatchNorm1d(size), nn.ReLU()),
            *(nn.Linear(size, size, bias=False), nn.BatchNorm1d(size), nn.ReLU(), nn.Linear(size, size)),
        )
        self.norm = nn.BatchNorm1d(size, affine=False)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        seen = [self.norm(self.project(self.see(view))) for view in (one, two)]
        alike = (seen[0].T @ seen[1]).float() / len(one)
        same = torch.diagonal(alike)
        return (same - 1).square().sum() + 0.005 * (alike.square().sum() - same.square().sum())


def barlow() -> Made:
    """512 pairs of images of 32 x 32."""
    return Barlow(), (torch.rand(512, 3, 32, 32), torch.rand(512, 3, 32, 32))


class Cell(nn.Module):
    """A wide depthwise convolution between two of one pixel, and a gate of the channels (as in NVAE)."""

    def __init__(self, width: int, wide: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(width), nn.Conv2d(width, wide * width, 1, bias=False)),
            *(nn.BatchNorm2d(wide * width), nn.SiLU()),
            nn.Conv2d(wide * width, wide * width, 5, padding=2, groups=wide * width, bias=False),
            *(nn.BatchNorm2d(wide * width), nn.SiLU()),
            *(nn.Conv2d(wide * width, width, 1, bias=False), nn.BatchNorm2d(width)),
        )
        self.gate = nn.Sequential(
            nn.Linear(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return x + 0.1 * y * self.gate(y.mean((2, 3)))[..., None, None]


class DeepVae(nn.Module):
    """Images as random numbers at three sizes, each given those at the smaller ones."""

    def __init__(self, width: int = 64, latent: int = 16, levels: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.encode = nn.ModuleList(Cell(width) for _ in range(levels))
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for _ in range(levels))
        self.prior = nn.ModuleList(nn.Conv2d(width, 2 * latent, 1) for _ in range(levels))
        self.posterior = nn.ModuleList(nn.Conv2d(2 * width, 2 * latent, 3, padding=1) for _ in range(levels))
        self.join = nn.ModuleList(nn.Conv2d(width + latent, width, 1) for _ in range(levels))
        self.decode = nn.ModuleList(Cell(width) for _ in range(levels))
        self.start = nn.Parameter(torch.zeros(1, width, 4, 4))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, seen = self.enter(images), []
        for cell, down in zip(self.encode, self.down, strict=True):
            x = down(cell(x))
            seen.append(x)
        x = self.start.expand(len(images), -1, -1, -1)
        cost: Any = 0.0
        for prior, posterior, join, cell in zip(
            self.prior, self.posterior, self.join, self.decode, strict=True
        ):
            mean, spread = prior(x).float().chunk(2, 1)
            shift, narrower = posterior(torch.cat([x, seen.pop()], 1)).float().chunk(2, 1)
            drawn = mean + shift + torch.randn_like(mean) * (spread + narrower).exp()
            term = shift.square() * (-2 * spread).exp() + (2 * narrower).exp() - 2 * narrower - 1
            cost = cost + 0.5 * term.sum((1, 2, 3)).mean()
            x = cell(join(torch.cat([x, drawn.to(x.dtype)], 1)))
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        made = self.leave(x).float()
        return F.binary_cross_entropy_with_logits(made, images, reduction="sum") / len(images) + cost


def deep_vae() -> Made:
    """256 images of 32 x 32."""
    return DeepVae(), (torch.rand(256, 3, 32, 32),)


class Graphormer(nn.Module):
    """Molecules as sequences of atoms: attention with a learnt bias of how many bonds lie between two."""

    def __init__(self, width: int = 256, heads: int = 8, layers: int = 5) -> None:
        super().__init__()
        self.atoms = nn.Embedding(512, width, padding_idx=0)
        self.degrees = nn.Embedding(64, width)
        self.apart = nn.Embedding(64, heads)
        self.whole = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.encoder = Encoder(width, heads, layers, dropout=0.1)
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 1)
        )

    def forward(
        self, atoms: torch.Tensor, degrees: torch.Tensor, apart: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        x = self.atoms(atoms).sum(2) + self.degrees(degrees)
        x = torch.cat([self.whole.expand(len(x), -1, -1), x], 1)
        bias = F.pad(self.apart(apart).permute(0, 3, 1, 2), (1, 0, 1, 0))
        return F.l1_loss(self.head(self.encoder(x, bias)[:, 0])[:, 0].float(), value)


def graphormer() -> Made:
    """128 molecules of 63 atoms of nine features."""
    return Graphormer(), (
        *(torch.randint(0, 512, (128, 63, 9)), torch.randint(0, 64, (128, 63))),
        *(torch.randint(0, 64, (128, 63, 63)), torch.randn(128)),
    )


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class DiffusionTransformer(nn.Module):
    """Noise is taken from patches of latents; time and class scale and shift every norm (DiT)."""

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.places = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1001, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(mlp(width, 4 * width) for _ in range(layers))
        self.modulate = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width)) for _ in range(layers)
        )
        self.last = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, 16)

    def forward(
        self, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor, classes: torch.Tensor
    ) -> torch.Tensor:
        signal = torch.cos(time * torch.pi / 2)[:, None, None, None]
        x = signal * latents + (1 - signal.square()).sqrt() * noise
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        rates = torch.exp(-9.2 * torch.arange(128, device=time.device) / 128)
        waves = 1000 * time[:, None] * rates
        given = self.times(torch.cat([waves.cos(), waves.sin()], -1)) + self.classes(classes)
        norm = x.shape[-1:]
        for attention, feed, modulate in zip(self.attention, self.mlps, self.modulate, strict=True):
            shift, scale, gate, shift_feed, scale_feed, gate_feed = modulate(given).chunk(6, -1)
            x = x + gate[:, None] * attention(modulated(F.layer_norm(x, norm), shift, scale))
            x = x + gate_feed[:, None] * feed(modulated(F.layer_norm(x, norm), shift_feed, scale_feed))
        x = self.head(modulated(F.layer_norm(x, norm), *self.last(given).chunk(2, -1)))
        x = (
            x.unflatten(1, (16, 16))
            .unflatten(-1, (2, 2, 4))
            .permute(0, 5, 1, 3, 2, 4)
            .flatten(4)
            .flatten(2, 3)
        )
        return F.mse_loss(x.float(), noise)


def diffusion_transformer() -> Made:
    """96 latents of 32 x 32."""
    return DiffusionTransformer(), (
        *(torch.randn(96, 4, 32, 32), torch.randn(96, 4, 32, 32)),
        *(torch.rand(96), torch.randint(0, 1000, (96,))),
    )


class MaskedAutoencoder(nn.Module):
    """Three quarters of an image's patches are left out and made again by what the others tell."""

    def __init__(self, width: int = 384, narrow: int = 192, keep: int = 36) -> None:
        super().__init__()
        self.keep = keep
        self.patches = nn.Linear(768, width)
        self.places = nn.Parameter(torch.randn(1, 144, width) * 0.02)
        self.encoder = Encoder(width, 6, 6)
        self.between = nn.Linear(width, narrow)
        self.missing = nn.Parameter(torch.randn(1, 1, narrow) * 0.02)
        self.places_again = nn.Parameter(torch.randn(1, 144, narrow) * 0.02)
        self.decoder = Encoder(narrow, 6, 2)
        self.head = nn.Linear(narrow, 768)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = (
            images.unflatten(3, (12, 16))
            .unflatten(2, (12, 16))
            .permute(0, 2, 4, 3, 5, 1)
            .flatten(3)
            .flatten(1, 2)
        )
        order = torch.rand(patches.shape[:2], device=images.device).argsort(1)
        back = order.argsort(1)
        x = self.patches(patches) + self.places
        x = x.gather(1, order[:, : self.keep, None].expand(-1, -1, x.shape[-1]))
        x = self.between(self.encoder(x))
        x = torch.cat([x, self.missing.to(x.dtype).expand(len(x), 144 - self.keep, -1)], 1)
        x = x.gather(1, back[..., None].expand(-1, -1, x.shape[-1])) + self.places_again
        made = self.head(self.decoder(x)).float()
        mean, spread = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        error = (made - (patches - mean) / (spread + 1e-6).sqrt()).square().mean(-1)
        hidden = (back >= self.keep).float()
        return (error * hidden).sum() / hidden.sum()


def masked_autoencoder() -> Made:
    """256 images of 192 x 192."""
    return MaskedAutoencoder(), (torch.rand(256, 3, 192, 192),)


class Residuals(nn.Module):
    """Three dilated convolutions over time, each beside a shortcut."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, size, padding=(size - 1) // 2 * d, dilation=d) for d in (1, 3, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class Vocoder(nn.Module):
    """Spectrograms to samples: transposed convolutions, between them fields of several sizes (HiFi-GAN)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.enter = nn.Conv1d(80, width, 7, padding=3)
        widths = [width // 2**i for i in range(4)]
        rates = (8, 8, 4)
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(a, b, 2 * rate, rate, rate // 2)
            for (a, b), rate in zip(pairwise(widths), rates, strict=True)
        )
        self.fields = nn.ModuleList(
            nn.ModuleList(Residuals(b, size) for size in (3, 7, 11)) for b in widths[1:]
        )
        self.leave = nn.Conv1d(widths[-1], 1, 7, padding=3)

    def forward(self, bands: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        x = self.enter(bands)
        for up, fields in zip(self.up, self.fields, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(field(x) for field in fields) / len(fields)
        made = self.leave(F.leaky_relu(x)).tanh()[:, 0].float()
        coarse = F.l1_loss(F.avg_pool1d(made[:, None], 16, 8), F.avg_pool1d(samples[:, None], 16, 8))
        return F.l1_loss(made, samples) + coarse


def vocoder() -> Made:
    """16 stretches of 32 frames."""
    return Vocoder(), (torch.randn(16, 80, 32), torch.rand(16, 8192))


class PatchSeries(nn.Module):
    """Series, each by itself, as overlapping patches that look at each other (PatchTST)."""

    def __init__(self, width: int = 128, future: int = 96) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(21)), nn.Parameter(torch.zeros(21))
        self.enter = nn.Linear(16, width)
        self.places = nn.Parameter(torch.randn(1, 42, width) * 0.02)
        self.encoder = Encoder(width, 16, 3, dropout=0.2)
        self.head = nn.Linear(42 * width, future)

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        mean, spread = past.mean(1, keepdim=True), (past.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        x = ((past - mean) / spread * self.scale + self.shift).transpose(1, 2)
        x = F.pad(x, (0, 8), mode="replicate").unfold(-1, 16, 8)
        x = F.dropout(self.enter(x).flatten(0, 1) + self.places, 0.2, self.training)
        x = self.head(self.encoder(x).flatten(1)).unflatten(0, (len(past), -1)).transpose(1, 2)
        x = (x - self.shift) / (self.scale + 1e-8) * spread + mean
        return F.mse_loss(x.float(), future)


def patch_series() -> Made:
    """64 times 21 series of 336."""
    return PatchSeries(), (torch.randn(64, 336, 21), torch.randn(64, 96, 21))


class Decisions(nn.Module):
    """What is to be gained, states and actions in turn, and a causal transformer that tells actions."""

    def __init__(self, states: int = 17, actions: int = 6, width: int = 128) -> None:
        super().__init__()
        self.times = nn.Embedding(1000, width)
        self.gain, self.state, self.action = (nn.Linear(size, width) for size in (1, states, actions))
        self.norm = nn.LayerNorm(width)
        self.decoder = Encoder(width, 4, 3, causal=True, dropout=0.1)
        self.head = nn.Sequential(nn.Linear(width, actions), nn.Tanh())

    def forward(
        self, gains: torch.Tensor, states: torch.Tensor, actions: torch.Tensor, times: torch.Tensor
    ) -> torch.Tensor:
        parts = zip((self.gain, self.state, self.action), (gains, states, actions), strict=True)
        when = self.times(times)
        x = torch.stack([net(part) + when for net, part in parts], 2).flatten(1, 2)
        x = self.decoder(self.norm(x)).unflatten(1, (-1, 3))
        return F.mse_loss(self.head(x[:, :, 1]).float(), actions)


def decisions() -> Made:
    """256 stretches of 20 moments."""
    return Decisions(), (
        *(torch.randn(256, 20, 1), torch.randn(256, 20, 17)),
        *(torch.rand(256, 20, 6), torch.randint(0, 1000, (256, 20))),
    )


def conv_norm(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(inplace=True),
    )


class Split(nn.Module):
    """Half of the channels goes through small residual layers, and all that was made is joined (C2f)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        half = width // 2
        self.enter = conv_norm(width, width, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(conv_norm(half, half), conv_norm(half, half)) for _ in range(layers)
        )
        self.leave = conv_norm((2 + layers) * half, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [*self.enter(x).chunk(2, 1)]
        for layer in self.layers:
            parts.append(parts[-1] + layer(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class Yolo(nn.Module):
    """One-stage detection: classes by cross-entropy, boxes by their overlap, on grids of two sizes."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        self.enter = nn.Sequential(conv_norm(3, 16, 3, 2), conv_norm(16, 32, 3, 2), Split(32, 1))
        self.middle = nn.Sequential(
            conv_norm(32, 64, 3, 2), Split(64, 2), conv_norm(64, 128, 3, 2), Split(128, 2)
        )
        self.deep = nn.Sequential(conv_norm(128, 256, 3, 2), Split(256, 1))
        self.narrow, self.pooled = conv_norm(256, 128, 1), conv_norm(512, 256, 1)
        self.across = conv_norm(256 + 128, 128, 1)
        self.heads = nn.ModuleList(
            nn.Sequential(conv_norm(width, 128), nn.Conv2d(128, classes + 4, 1)) for width in (128, 256)
        )

    def forward(self, images: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        middle = self.middle(self.enter(images))
        pools = [self.narrow(self.deep(middle))]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        deep = self.pooled(torch.cat(pools, 1))
        middle = self.across(torch.cat([F.interpolate(deep, scale_factor=2.0), middle], 1))
        said = [head(x).flatten(2) for head, x in zip(self.heads, (middle, deep), strict=True)]
        found = torch.cat(said, 2).transpose(1, 2).float()
        corners = found[..., :4].exp()
        overlap = torch.minimum(corners[..., :2], boxes[..., :2]).sum(-1) * torch.minimum(
            corners[..., 2:], boxes[..., 2:]
        ).sum(-1)
        whole = corners.sum(-1).square() + boxes.sum(-1).square() - overlap
        weight = classes.amax(-1)
        lost = ((1 - overlap / (whole + 1e-6)) * weight).sum() / weight.sum().clamp(min=1)
        return F.binary_cross_entropy_with_logits(found[..., 4:], classes) + lost


def yolo() -> Made:
    """16 images of 320 x 320."""
    return Yolo(), (torch.rand(16, 3, 320, 320), torch.rand(16, 500, 80), torch.rand(16, 500, 4))


class Isomorphism(nn.Module):
    """Nodes add up their neighbours, a network follows; graphs are sums of their nodes (GIN)."""

    def __init__(self, width: int = 256, layers: int = 5) -> None:
        super().__init__()
        self.atoms = nn.Embedding(120, width)
        self.bonds = nn.ModuleList(nn.Embedding(8, width) for _ in range(layers))
        self.own = nn.Parameter(torch.zeros(layers))
        self.nets = nn.ModuleList(
            nn.Sequential(
                *(
                    nn.Linear(width, 2 * width),
                    nn.BatchNorm1d(2 * width),
                    nn.ReLU(),
                    nn.Linear(2 * width, width),
                ),
                *(nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3)),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def forward(
        self,
        atoms: torch.Tensor,
        edges: torch.Tensor,
        bonds: torch.Tensor,
        graphs: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        x = self.atoms(atoms)
        for i, (net, embed) in enumerate(zip(self.nets, self.bonds, strict=True)):
            messages = F.relu(x[edges[0]] + embed(bonds))
            near = torch.zeros_like(x).index_add(0, edges[1], messages)
            x = net((1 + self.own[i]) * x + near).float()
        whole = x.new_zeros(len(labels), x.shape[1]).index_add(0, graphs, x)
        return F.binary_cross_entropy_with_logits(self.head(whole)[:, 0].float(), labels)


def isomorphism() -> Made:
    """512 molecules, 13,312 atoms, 28,672 bonds."""
    return Isomorphism(), (
        *(torch.randint(0, 120, (13312,)), torch.randint(0, 13312, (2, 28672))),
        *(torch.randint(0, 8, (28672,)), torch.arange(512).repeat_interleave(26), torch.rand(512).round()),
    )


# ---- predicted once those before had shown what was mended ----------------------------------------


class Painter(nn.Module):
    """Sketches to photographs: a U-Net of strided convolutions, and what patches of its pictures look like
    to another network (pix2pix)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width * min(2**i, 8) for i in range(6)]
        self.enter = nn.Conv2d(3, width, 4, 2, 1)
        self.down = nn.ModuleList(
            nn.Sequential(nn.LeakyReLU(0.2), nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b))
            for a, b in pairwise(sizes)
        )
        backwards = [*reversed(sizes)]
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                nn.ConvTranspose2d(a * (1 + (i > 0)), b, 4, 2, 1, bias=False),
                nn.BatchNorm2d(b),
                nn.Dropout(0.5 if i < 2 else 0.0),
            )
            for i, (a, b) in enumerate(pairwise(backwards))
        )
        self.leave = nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh())
        looks = ((64, 128, 2), (128, 256, 2), (256, 512, 1))
        self.look = nn.Sequential(
            *(nn.Conv2d(6, 64, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(
                nn.Sequential(nn.Conv2d(a, b, 4, s, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
                for a, b, s in looks
            ),
            nn.Conv2d(512, 1, 4, 1, 1),
        )

    def forward(self, sketch: torch.Tensor, photo: torch.Tensor) -> torch.Tensor:
        seen = [self.enter(sketch)]
        for down in self.down:
            seen.append(down(seen[-1]))
        x = seen.pop()
        for up in self.up:
            x = torch.cat([up(x), seen.pop()], 1)
        made = self.leave(x).float()
        fooled = self.look(torch.cat([sketch, made], 1)).float()
        told = self.look(torch.cat([sketch, photo], 1)).float()
        seen_through = F.softplus(-fooled).mean() + F.softplus(-told).mean()
        return seen_through + 100 * F.l1_loss(made, photo)


def painter() -> Made:
    """16 pictures of 256 x 256."""
    return Painter(), (torch.rand(16, 3, 256, 256), torch.rand(16, 3, 256, 256))


class Neighbours(nn.Module):
    """Users and items as the means of what they have to do with, over three steps; pairs are ranked
    (LightGCN)."""

    def __init__(self, users: int = 20_000, items: int = 30_000, width: int = 64) -> None:
        super().__init__()
        self.users = users
        self.rows = nn.Parameter(torch.randn(users + items, width) * 0.1)

    def forward(
        self,
        edges: torch.Tensor,
        weights: torch.Tensor,
        user: torch.Tensor,
        good: torch.Tensor,
        bad: torch.Tensor,
    ) -> torch.Tensor:
        x, total = self.rows, self.rows
        for _ in range(3):
            x = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * weights[:, None])
            total = total + x
        mean = total / 4
        who, one, other = mean[user], mean[self.users + good], mean[self.users + bad]
        ranked = F.softplus((who * other).sum(1) - (who * one).sum(1)).mean()
        size = self.rows[user].square().sum() + self.rows[self.users + good].square().sum()
        return ranked + 1e-4 * size / len(user)


def neighbours() -> Made:
    """50,000 rows, 600,000 edges, 4096 triples."""
    return Neighbours(), (
        *(torch.randint(0, 50_000, (2, 600_000)), torch.rand(600_000)),
        *(torch.randint(0, 20_000, (4096,)), torch.randint(0, 30_000, (4096,))),
        torch.randint(0, 30_000, (4096,)),
    )


class StateSpace(nn.Module):
    """A layer whose state decays by what it reads, in chunks: products within, and from state to state
    (Mamba 2)."""

    def __init__(self, width: int, heads: int, state: int = 64, chunk: int = 64) -> None:
        super().__init__()
        self.heads, self.state, self.chunk, self.inner = heads, state, chunk, 2 * width
        self.enter = nn.Linear(width, 2 * self.inner + 2 * state + heads, bias=False)
        mixed = self.inner + 2 * state
        self.conv = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.rate = nn.Parameter(torch.zeros(heads))
        self.decay = nn.Parameter(torch.zeros(heads))
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(self.inner)
        self.leave = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        gate, mixed, rate = self.enter(x).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        value, key, query = mixed.split([self.inner, self.state, self.state], -1)
        rate = F.softplus(rate.float() + self.rate)
        value = value.unflatten(-1, (self.heads, -1))
        scaled = (value * rate[..., None]).unflatten(1, (-1, self.chunk))
        key, query = (each.unflatten(1, (-1, self.chunk)) for each in (key, query))
        decay = (-self.decay.exp() * rate).unflatten(1, (-1, self.chunk)).cumsum(2)
        apart = decay[:, :, :, None] - decay[:, :, None]
        there = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=x.device).tril()
        scores = torch.einsum("bcls,bcms->bclm", query, key)
        weight = scores[..., None] * apart.masked_fill(~there[..., None], float("-inf")).exp()
        within = torch.einsum("bclmh,bcmhp->bclhp", weight, scaled)
        left = (decay[:, :, -1:] - decay).exp()
        states = torch.einsum("bcms,bcmhp->bchps", key, left[..., None] * scaled)
        whole = decay[:, :, -1].exp()
        now, before = torch.zeros_like(states[:, 0]), []
        for i in range(states.shape[1]):
            before.append(now)
            now = now * whole[:, i, :, None, None] + states[:, i]
        across = torch.einsum("bcls,bchps->bclhp", query, torch.stack(before, 1)) * decay.exp()[..., None]
        y = (within + across).flatten(1, 2) + value * self.skip[:, None]
        return self.leave(self.norm(y.flatten(2) * F.silu(gate)))


class StateSpaces(nn.Module):
    """A language model of such layers."""

    def __init__(self, width: int = 512, layers: int = 4, words: int = 16_000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers + 1))
        self.layers = nn.ModuleList(StateSpace(width, 16) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(self.norms[-1](x)).flatten(0, 1).float(), words[:, 1:].flatten())


def state_spaces() -> Made:
    """8 texts of 512 words."""
    return StateSpaces(), (torch.randint(0, 16_000, (8, 513)),)


class Film(nn.Module):
    """Films by attention over time at each place, then over places at each time (TimeSformer)."""

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 4, classes: int = 400) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.randn(1, 1, 49, width) * 0.02)
        self.times = nn.Parameter(torch.randn(1, 8, 1, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 * layers + 1))
        self.time = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.place = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(mlp(width, 4 * width, 0.1) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, films: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count, frames = films.shape[:2]
        x = self.patches(films.flatten(0, 1)).flatten(2).transpose(1, 2).unflatten(0, (count, frames))
        x = x + self.places + self.times
        for i, (time, place, feed) in enumerate(zip(self.time, self.place, self.mlps, strict=True)):
            y = time(self.norms[3 * i](x).transpose(1, 2).flatten(0, 1))
            x = x + y.unflatten(0, (count, -1)).transpose(1, 2)
            x = x + place(self.norms[3 * i + 1](x).flatten(0, 1)).unflatten(0, (count, frames))
            x = x + feed(self.norms[3 * i + 2](x))
        return F.cross_entropy(self.head(self.norms[-1](x).mean((1, 2))), labels, label_smoothing=0.1)


def film() -> Made:
    """32 films of eight frames of 112 x 112."""
    return Film(), (torch.randn(32, 8, 3, 112, 112), torch.randint(0, 400, (32,)))


class DenseBlock(nn.Module):
    """Convolutions of all that was made before, and an added input."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width + i * growth, growth, 3, padding=1) for i in range(4))
        self.leave = nn.Conv2d(width + 4 * growth, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x]
        for conv in self.convs:
            parts.append(F.leaky_relu(conv(torch.cat(parts, 1)), 0.2))
        return x + 0.2 * self.leave(torch.cat(parts, 1))


class Enlarged(nn.Module):
    """Images four times as large: dense blocks within residuals (as in ESRGAN)."""

    def __init__(self, width: int = 64, growth: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(DenseBlock(width, growth) for _ in range(3))) for _ in range(blocks)
        )
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.leave = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        x = first = self.enter(small)
        for block in self.blocks:
            x = x + 0.2 * block(x)
        x = first + self.body(x)
        for up in self.up:
            x = F.leaky_relu(up(F.interpolate(x, scale_factor=2.0, mode="nearest")), 0.2)
        return F.l1_loss(self.leave(x).float(), large)


def enlarged() -> Made:
    """16 patches of 48 x 48."""
    return Enlarged(), (torch.rand(16, 3, 48, 48), torch.rand(16, 3, 192, 192))


class Mixer(nn.Module):
    """Series: networks over time, then over features, with batch norms (TSMixer)."""

    def __init__(self, past: int = 512, future: int = 96, features: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.time = nn.ModuleList(nn.Linear(past, past) for _ in range(blocks))
        self.feed = nn.ModuleList(
            nn.Sequential(
                nn.Linear(features, 256),
                nn.ReLU(),
                nn.Dropout(0.3),
                nn.Linear(256, features),
                nn.Dropout(0.3),
            )
            for _ in range(blocks)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(past) for _ in range(2 * blocks))
        self.head = nn.Linear(past, future)

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        x = past
        for i, (time, feed) in enumerate(zip(self.time, self.feed, strict=True)):
            y = F.relu(time(self.norms[2 * i](x).transpose(1, 2))).transpose(1, 2)
            x = x + F.dropout(y, 0.3, self.training)
            x = x + feed(self.norms[2 * i + 1](x))
        return F.mse_loss(self.head(x.transpose(1, 2)).transpose(1, 2).float(), future)


def mixer() -> Made:
    """256 series of 512 moments of 64 features."""
    return Mixer(), (torch.randn(256, 512, 64), torch.randn(256, 96, 64))


class Conditioned(nn.Module):
    """Two convolutions over time, scaled and shifted between by what is seen."""

    def __init__(self, inputs: int, width: int, given: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(inputs, width, 5, padding=2), nn.GroupNorm(8, width), nn.Mish())
        self.second = nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.GroupNorm(8, width), nn.Mish())
        self.given = nn.Sequential(nn.Mish(), nn.Linear(given, 2 * width))
        self.beside = nn.Conv1d(inputs, width, 1) if inputs != width else nn.Identity()

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        scale, shift = self.given(given)[..., None].chunk(2, 1)
        return self.second(self.first(x) * scale + shift) + self.beside(x)


class DiffusionPolicy(nn.Module):
    """Actions out of noise by a U-Net over time, given what is seen and how much noise there is."""

    def __init__(self, actions: int = 8, seen: int = 128, width: int = 128) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(128, 512), nn.Mish(), nn.Linear(512, 128))
        sizes = [actions, width, 2 * width, 4 * width]
        given = 128 + seen
        self.down = nn.ModuleList(
            nn.ModuleList((Conditioned(a, b, given), Conditioned(b, b, given))) for a, b in pairwise(sizes)
        )
        self.shrink = nn.ModuleList(nn.Conv1d(b, b, 3, 2, 1) for b in sizes[1:-1])
        self.middle = Conditioned(sizes[-1], sizes[-1], given)
        self.up = nn.ModuleList(
            nn.ModuleList((Conditioned(2 * b, a, given), Conditioned(a, a, given)))
            for b, a in ((sizes[3], sizes[2]), (sizes[2], sizes[1]))
        )
        self.grow = nn.ModuleList(nn.ConvTranspose1d(a, a, 4, 2, 1) for a in (sizes[2], sizes[1]))
        self.leave = nn.Sequential(
            nn.Conv1d(width, width, 5, padding=2),
            nn.GroupNorm(8, width),
            nn.Mish(),
            nn.Conv1d(width, actions, 1),
        )

    def forward(
        self, actions: torch.Tensor, noise: torch.Tensor, seen: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        left = torch.cos(time * torch.pi / 2)[:, None, None]
        x = left * actions + (1 - left.square()).sqrt() * noise
        rates = torch.exp(-9.2 * torch.arange(64, device=time.device) / 64)
        waves = 100 * time[:, None] * rates
        given = torch.cat([self.times(torch.cat([waves.sin(), waves.cos()], 1)), seen], 1)
        kept = []
        for i, (one, two) in enumerate(self.down):
            x = two(one(x, given), given)
            kept.append(x)
            x = self.shrink[i](x) if i < len(self.shrink) else x
        x = self.middle(x, given)
        for (one, two), grow in zip(self.up, self.grow, strict=True):
            x = grow(two(one(torch.cat([x, kept.pop()], 1), given), given))
        return F.mse_loss(self.leave(x).float(), noise)


def diffusion_policy() -> Made:
    """512 stretches of 32 actions."""
    return DiffusionPolicy(), (
        *(torch.randn(512, 8, 32), torch.randn(512, 8, 32)),
        *(torch.randn(512, 128), torch.rand(512)),
    )


def point_layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(each for a, b in pairwise(widths) for each in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()))
    )


class Turn(nn.Module):
    """A matrix that turns points, or their features, found from all of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.see = point_layers(size, 64, 128, 1024)
        self.tell = nn.Sequential(
            *(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU()),
            *(nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, size * size)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.tell(self.see(x).amax(-1)).unflatten(1, (self.size, self.size))
        return turned + torch.eye(self.size, device=x.device)


class PointNet(nn.Module):
    """Clouds of points: a network of each point, and the most of each feature."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.turn, self.turn_features = Turn(3), Turn(64)
        self.first, self.second = point_layers(3, 64, 64), point_layers(64, 64, 128, 1024)
        self.head = nn.Sequential(
            *(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256), nn.Dropout(0.3)),
            *(nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, classes)),
        )

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.bmm(self.turn(points), points))
        turned = self.turn_features(x)
        x = self.second(torch.bmm(turned, x)).amax(-1)
        apart = torch.bmm(turned, turned.transpose(1, 2)).float() - torch.eye(64, device=x.device)
        return F.cross_entropy(self.head(x), labels) + 1e-3 * apart.square().sum((1, 2)).mean()


def point_net() -> Made:
    """64 clouds of 1024 points."""
    return PointNet(), (torch.randn(64, 3, 1024), torch.randint(0, 40, (64,)))


class Contrast(nn.Module):
    """Speech without labels: convolutions over samples, some of what they say masked, and a transformer that
    is to tell it from what was said at other moments (as in wav2vec 2.0)."""

    def __init__(self, width: int = 256, model: int = 384) -> None:
        super().__init__()
        shapes = ((1, 10, 5), (width, 3, 2), (width, 3, 2), (width, 3, 2), (width, 2, 2), (width, 2, 2))
        self.see = nn.ModuleList(nn.Conv1d(a, width, size, stride, bias=False) for a, size, stride in shapes)
        self.norm = nn.GroupNorm(width, width)
        self.layer_norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, model)
        self.mask = nn.Parameter(torch.randn(model))
        self.places = nn.Conv1d(model, model, 65, padding=32, groups=16)
        self.encoder = Encoder(model, 6, 4, dropout=0.1)
        self.told, self.target = nn.Linear(model, 128), nn.Linear(width, 128)

    def forward(self, sound: torch.Tensor, masked: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        x = sound[:, None]
        for i, conv in enumerate(self.see):
            x = conv(x)
            x = F.gelu(self.norm(x) if i == 0 else x)
        seen = self.layer_norm(x.transpose(1, 2))
        x = torch.where(masked[..., None], self.mask, self.enter(seen))
        x = x + F.gelu(self.places(x.transpose(1, 2))).transpose(1, 2)
        said, target = self.told(self.encoder(x)), self.target(seen)
        negative = target.gather(1, others.flatten(1)[..., None].expand(-1, -1, 128)).unflatten(
            1, others.shape[1:]
        )
        chosen = torch.cat([target[:, :, None], negative], 2)
        alike = F.cosine_similarity(said[:, :, None].float(), chosen.float(), dim=-1) / 0.1
        lost = -alike.log_softmax(-1)[..., 0]
        return (lost * masked).sum() / masked.sum()


def contrast() -> Made:
    """8 stretches of two seconds, 20 other moments for each."""
    return Contrast(), (
        torch.randn(8, 32_000),
        torch.rand(8, 199) < 0.5,
        torch.randint(0, 199, (8, 199, 20)),
    )


class Equivariant(nn.Module):
    """Particles: messages by distances move both what they are and where they are (EGNN)."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(11, width)

        def net(inputs: int, out: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, out))

        self.edges = nn.ModuleList(net(2 * width + 1, width) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(width, 1) for _ in range(layers))
        self.moves = nn.ModuleList(net(width, 1) for _ in range(layers))
        self.nodes = nn.ModuleList(net(2 * width, width) for _ in range(layers))
        self.head = net(width, 1)

    def forward(
        self, kinds: torch.Tensor, places: torch.Tensor, there: torch.Tensor, energy: torch.Tensor
    ) -> torch.Tensor:
        x, count = self.enter(kinds), kinds.shape[1]
        both = (there[:, :, None] * there[:, None])[..., None]
        for edge, gate, move, node in zip(self.edges, self.gates, self.moves, self.nodes, strict=True):
            apart = places[:, :, None] - places[:, None]
            square = apart.square().sum(-1, keepdim=True)
            pairs = [x[:, :, None].expand(-1, -1, count, -1), x[:, None].expand(-1, count, -1, -1), square]
            message = F.silu(edge(torch.cat(pairs, -1)))
            message = message * gate(message).sigmoid() * both
            places = places + (apart * move(message).tanh() * both).sum(2) / count
            x = x + node(torch.cat([x, message.sum(2)], -1))
        return F.l1_loss((self.head(x)[..., 0] * there).sum(1).float(), energy)


def equivariant() -> Made:
    """64 molecules of 29 atoms."""
    return Equivariant(), (
        *(torch.randn(64, 29, 11), torch.randn(64, 29, 3)),
        *((torch.rand(64, 29) < 0.7).float(), torch.randn(64)),
    )
