"""Models whose compiled steps were predicted before they were measured, after those of ``unseen_models.py``
had shown what was amiss: captions, sound, splines, latents, hashed grids, sessions, triplets, state spaces,
twin critics, adapters, quantised convolutions, diffusion. Each function returns a model and its inputs, each
model its loss.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


class Captions(nn.Module):
    """Convolutions look at an image, a decoder with attention to what they see writes of it."""

    def __init__(self, width: int = 256, layers: int = 3, vocabulary: int = 8000) -> None:
        super().__init__()
        self.see = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.GELU())
                for a, b in pairwise((3, 32, 64, 128, width))
            )
        )
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        layer = nn.TransformerDecoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
        self.write = nn.TransformerDecoder(layer, layers)
        self.leave = nn.Linear(width, vocabulary)

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen = self.see(images).flatten(2).transpose(1, 2)
        x = self.embed(words[:, :-1])
        x = x + self.place[:, : x.shape[1]]
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = self.write(x, seen, tgt_mask=later, tgt_is_causal=True)
        return F.cross_entropy(self.leave(x).flatten(0, 1), words[:, 1:].flatten())


def captions() -> Made:
    """64 images of 160 x 160, 49 words of each."""
    return Captions(), (torch.randn(64, 3, 160, 160), torch.randint(0, 8000, (64, 50)))


class Sound(nn.Module):
    """Voices taken apart: strided convolutions over samples down, transposed ones up, gated units."""

    def __init__(self, widths: tuple[int, ...] = (2, 48, 96, 192, 384)) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 8, 4, 2), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(1))
            for a, b in pairwise(widths)
        )
        up = [*pairwise(reversed((8, *widths[1:])))]
        self.gates = nn.ModuleList(nn.Sequential(nn.Conv1d(a, 2 * a, 3, padding=1), nn.GLU(1)) for a, _ in up)
        self.up = nn.ModuleList(nn.ConvTranspose1d(a, b, 8, 4, 2) for a, b in up)

    def forward(self, mixed: torch.Tensor, voices: torch.Tensor) -> torch.Tensor:
        x, skips = mixed, []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        for gate, layer, skip in zip(self.gates, self.up, reversed(skips), strict=True):
            x = layer(gate(x + skip))
            x = x if x.shape[1] == voices.shape[1] else x.relu()
        return F.l1_loss(x, voices)


def sound() -> Made:
    """16 stretches of 65,536 samples of two channels."""
    return Sound(), (torch.randn(16, 2, 65536), torch.randn(16, 8, 65536))


class Splines(nn.Module):
    """Layers of learnt functions of each input: bases of B-splines, and a product with their coefficients."""

    def __init__(self, widths: tuple[int, ...] = (128, 256, 256, 64), grid: int = 8, order: int = 3) -> None:
        super().__init__()
        self.order = order
        step = 2 / grid
        self.register_buffer("knots", torch.arange(-order, grid + order + 1) * step - 1)
        self.base = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        self.curves = nn.ModuleList(nn.Linear(a * (grid + order), b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for base, curve in zip(self.base, self.curves, strict=True):
            at, knots = x.tanh().float()[..., None], self.knots
            b = ((at >= knots[:-1]) & (at < knots[1:])).float()
            for k in range(1, self.order + 1):
                left = (at - knots[: -k - 1]) / (knots[k:-1] - knots[: -k - 1]) * b[..., :-1]
                right = (knots[k + 1 :] - at) / (knots[k + 1 :] - knots[1:-k]) * b[..., 1:]
                b = left + right
            x = base(F.silu(x)) + curve(b.flatten(-2))
        return F.mse_loss(x.float(), wanted)


def splines() -> Made:
    """Batch 16,384."""
    return Splines(), (torch.randn(16384, 128), torch.randn(16384, 64))


class Latents(nn.Module):
    """Few latents ask a long input, by attention written out, then each other (as in Perceiver)."""

    def __init__(self, width: int = 512, latents: int = 256, entering: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width) * 0.02)
        self.enter = nn.Linear(entering, 2 * width)
        self.ask = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 2))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.leave = nn.Linear(width, 100)

    def forward(self, long: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        key, value = self.enter(long).unflatten(-1, (8, -1)).chunk(2, -1)
        asked = self.ask(self.norms[0](self.latents)).unflatten(-1, (8, -1))
        scores = torch.einsum("lhd,bshd->bhls", asked, key) / math.sqrt(asked.shape[-1])
        x = torch.einsum("bhls,bshd->blhd", scores.softmax(-1).to(value.dtype), value).flatten(2)
        for index, (mix, wide, narrow) in enumerate(zip(self.mix, self.wide, self.narrow, strict=True)):
            parts = mix(self.norms[2 * index + 1](x)).unflatten(-1, (8, -1)).transpose(1, 2).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
            x = x + narrow(F.gelu(wide(self.norms[2 * index + 2](x))))
        return F.cross_entropy(self.leave(self.norms[-1](x).mean(1)), labels)


def latents() -> Made:
    """16 inputs of 4096 rows."""
    return Latents(), (torch.randn(16, 4096, 64), torch.randint(0, 100, (16,)))


class Hashed(nn.Module):
    """A picture learnt by a network over grids of several sizes, whose corners are rows of hashed tables."""

    def __init__(self, levels: int = 8, rows: int = 2**16, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 4) for _ in range(levels))
        self.rows = rows
        self.net = nn.Sequential(
            nn.Linear(4 * levels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, points: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
        found = []
        for level, table in enumerate(self.tables):
            at = points * 16 * 1.6**level
            low = at.floor()
            part = at - low
            total: Any = 0.0
            for dx in (0, 1):
                for dy in (0, 1):
                    x, y = low[:, 0].long() + dx, low[:, 1].long() + dy
                    row = (x ^ (y * 2654435761)) % self.rows
                    weight = (part[:, 0] if dx else 1 - part[:, 0]) * (part[:, 1] if dy else 1 - part[:, 1])
                    total = total + table(row) * weight[:, None]
            found.append(total)
        return F.mse_loss(self.net(torch.cat(found, dim=1)).float(), colours)


def hashed() -> Made:
    """262,144 points of a picture."""
    return Hashed(), (torch.rand(2**18, 2), torch.rand(2**18, 3))


class Sessions(nn.Module):
    """What comes next in a session: causal attention over items, against items drawn at random."""

    def __init__(self, items: int = 200_000, width: int = 128, layers: int = 2, longest: int = 200) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.place = nn.Embedding(longest, width)
        self.drop = nn.Dropout(0.2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width))
            for _ in range(layers)
        )

    def forward(self, seen: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        before, after = seen[:, :-1], seen[:, 1:]
        x = self.drop(self.items(before) + self.place.weight[: before.shape[1]])
        for i, (mix, out, feed) in enumerate(zip(self.mix, self.out, self.feed, strict=True)):
            parts = mix(self.norms[2 * i](x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
            x = x + out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
            x = x + self.drop(feed(self.norms[2 * i + 1](x)))
        x = self.norms[-1](x).float()
        right, wrong = (x * self.items(after)).sum(-1), (x * self.items(drawn)).sum(-1)
        return -(F.logsigmoid(right) + F.logsigmoid(-wrong)).mean()


def sessions() -> Made:
    """512 sessions of 200 items."""
    return Sessions(), (torch.randint(0, 200_000, (512, 201)), torch.randint(0, 200_000, (512, 200)))


class Triplets(nn.Module):
    """Images whose hardest partner and hardest stranger within the batch are found by their distances."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise((3, 32, 64, 128, 256)):
            layers += [
                nn.Conv2d(a, b, 3, padding=1, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.see = nn.Sequential(*layers)
        self.leave = nn.Linear(256, width)

    def forward(self, images: torch.Tensor, who: torch.Tensor) -> torch.Tensor:
        x = F.normalize(self.leave(self.see(images).mean((2, 3))).float(), dim=-1)
        far = (2 - 2 * x @ x.T).clamp(min=1e-6).sqrt()
        same = who[:, None] == who[None]
        partner = far.masked_fill(~same, 0.0).amax(1)
        stranger = far.masked_fill(same, 10.0).amin(1)
        return F.relu(partner - stranger + 0.3).mean()


def triplets() -> Made:
    """256 images of 96 x 96 of 32 persons."""
    return Triplets(), (torch.randn(256, 3, 96, 96), torch.randint(0, 32, (256,)))


class States(nn.Module):
    """Linear state spaces over long sequences, as convolutions by the fast Fourier transform."""

    def __init__(self, width: int = 128, layers: int = 4, states: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.decay = nn.Parameter(torch.rand(layers, width, states))
        self.turn = nn.Parameter(torch.rand(layers, width, states) * math.pi)
        self.weight = nn.Parameter(torch.randn(layers, width, states) / states)
        self.mix = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        length = x.shape[1]
        time = torch.arange(length, device=x.device) / length
        for i, (mix, norm) in enumerate(zip(self.mix, self.norms, strict=True)):
            inside = self.decay[i].exp()[..., None] * -time
            wave = (self.turn[i][..., None] * time * length).cos()
            kernel = (self.weight[i][..., None] * inside.exp() * wave).sum(1)
            y = norm(x).float().transpose(1, 2)
            spectrum = torch.fft.rfft(y, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
            y = torch.fft.irfft(spectrum, n=2 * length)[..., :length].transpose(1, 2)
            x = x + F.glu(mix(F.gelu(y)), dim=-1)
        return F.cross_entropy(self.leave(x.mean(1)), labels)


def states() -> Made:
    """16 sequences of 2048."""
    return States(), (torch.randn(16, 2048, 16), torch.randint(0, 10, (16,)))


class Twins(nn.Module):
    """An actor whose normal actions are squashed, and two critics, of which the lower counts."""

    def __init__(self, seen: int = 376, acts: int = 17, width: int = 256) -> None:
        super().__init__()

        def net(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(inputs, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, outputs),
            )

        self.actor = net(seen, 2 * acts)
        self.critics = nn.ModuleList(net(seen + acts, 1) for _ in range(2))
        self.heat = nn.Parameter(torch.zeros(()))

    def forward(self, seen: torch.Tensor, did: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
        mean, spread = self.actor(seen).float().chunk(2, -1)
        spread = spread.clamp(-5, 2).exp()
        drawn = mean + spread * torch.randn_like(mean)
        act = drawn.tanh()
        chance = -0.5 * ((drawn - mean) / spread).square() - spread.log() - torch.log(1 - act.square() + 1e-6)
        said = [critic(torch.cat([seen, did], -1)).float()[:, 0] for critic in self.critics]
        off = sum(F.mse_loss(each, worth) for each in said)
        value = torch.minimum(*(critic(torch.cat([seen, act], -1)).float()[:, 0] for critic in self.critics))
        heat = self.heat.exp()
        return off + (heat * chance.sum(-1) - value).mean() - (self.heat * chance.detach().sum(-1)).mean()


def twins() -> Made:
    """Batch 1024."""
    return Twins(), (torch.randn(1024, 376), torch.randn(1024, 17).tanh(), torch.randn(1024))


class Adapted(nn.Module):
    """A language model whose weights stay; adapters of low rank beside its products learn."""

    def __init__(self, width: int = 1024, layers: int = 6, rank: int = 16, vocabulary: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        sizes = [(width, 3 * width), (width, width), (width, 3 * width), (3 * width, width)]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(layers) for a, b in sizes)
        self.leave = nn.Linear(width, vocabulary, bias=False)
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(each.in_features, rank, bias=False) for each in self.layers)
        self.up = nn.ModuleList(nn.Linear(rank, each.out_features, bias=False) for each in self.layers)

    def through(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[index](x) + 2.0 * self.up[index](self.down[index](x))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for i in range(0, len(self.layers), 4):
            mixed = self.through(i, self.norms[i // 2](x)).unflatten(-1, (16, -1)).transpose(1, 2)
            y = F.scaled_dot_product_attention(*mixed.chunk(3, -1), is_causal=True)
            x = x + self.through(i + 1, y.transpose(1, 2).flatten(2))
            x = x + self.through(i + 3, F.silu(self.through(i + 2, self.norms[i // 2 + 1](x))))
        return F.cross_entropy(self.leave(self.norms[-1](x)).flatten(0, 1), words[:, 1:].flatten())


def adapted() -> Made:
    """8 sequences of 512 words."""
    return Adapted(), (torch.randint(0, 32000, (8, 513)),)


class Quantised(nn.Module):
    """Convolutions whose weights and activations are rounded, with gradients straight through."""

    def __init__(self, widths: tuple[int, ...] = (64, 64, 128, 128, 256, 256)) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1 + (a != b), 1, bias=False) for a, b in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(a) for a in widths)
        self.steps = nn.Parameter(torch.full((len(widths),), 0.1))
        self.leave = nn.Linear(widths[-1], 100)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        for conv, norm, step in zip(self.convs, self.norms, self.steps, strict=False):
            x = norm(x).relu()
            rounded = (x / step).clamp(0, 15)
            x = (rounded + (rounded.round() - rounded).detach()) * step
            scale = conv.weight.abs().mean((1, 2, 3), keepdim=True)
            sign = conv.weight + (conv.weight.sign() * scale - conv.weight).detach()
            x = F.conv2d(x, sign, stride=conv.stride, padding=1)
        return F.cross_entropy(self.leave(self.norms[-1](x).relu().mean((2, 3))), labels)


def quantised() -> Made:
    """256 images of 32 x 32."""
    return Quantised(), (torch.randn(256, 3, 32, 32), torch.randint(0, 100, (256,)))


class Block(nn.Module):
    """A residual block of a diffusion model, which the time scales and shifts."""

    def __init__(self, inputs: int, width: int, time: int, attends: bool) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, inputs), nn.GroupNorm(8, width)
        self.one, self.two = nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time, 2 * width)
        self.skip = nn.Conv2d(inputs, width, 1) if inputs != width else nn.Identity()
        self.norm = nn.GroupNorm(8, width) if attends else None
        self.mix = nn.Conv2d(width, 3 * width, 1) if attends else None
        self.out = nn.Conv2d(width, width, 1) if attends else None

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.one(F.silu(self.first(x)))
        scale, shift = self.time(F.silu(time))[..., None, None].chunk(2, 1)
        x = self.skip(x) + self.two(F.silu(self.second(y) * (1 + scale) + shift))
        if self.norm is not None and self.mix is not None and self.out is not None:
            parts = self.mix(self.norm(x)).flatten(2).unflatten(1, (12, -1)).transpose(2, 3).chunk(3, 1)
            y = F.scaled_dot_product_attention(*parts).transpose(2, 3).reshape(x.shape)
            x = x + self.out(y)
        return x


class Diffusion(nn.Module):
    """A network that takes noise from images, down and up with skips, attention where the image is small."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256), time: int = 256) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, time), nn.SiLU(), nn.Linear(time, time))
        self.register_buffer("speeds", torch.exp(-torch.arange(32) * (math.log(10000) / 32)))
        self.enter = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            Block(a, b, time, b == widths[-1]) for a, b in pairwise((widths[0], *widths))
        )
        self.middle = Block(widths[-1], widths[-1], time, True)
        self.up = nn.ModuleList(
            Block(2 * a, b, time, a == widths[-1]) for a, b in pairwise((*reversed(widths), widths[0]))
        )
        self.leave = nn.Sequential(
            nn.GroupNorm(8, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1)
        )

    def forward(self, images: torch.Tensor, noise: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        angle = when[:, None].float() * self.speeds
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        left = torch.cos(when.float() / 1000 * math.pi / 2)[:, None, None, None]
        x = self.enter(left * images + (1 - left.square()).sqrt() * noise)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skip], 1), time)
        return F.mse_loss(self.leave(x).float(), noise)


def diffusion() -> Made:
    """32 images of 64 x 64."""
    return Diffusion(), (
        torch.randn(32, 3, 64, 64),
        torch.randn(32, 3, 64, 64),
        torch.randint(0, 1000, (32,)),
    )
