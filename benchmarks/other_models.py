"""Models whose compiled steps were predicted before they were measured, after those of ``newer_models.py``
had been taken to show what calls of libraries take of the host: capsules, weather, speakers, retention,
centres, matches, sets, forecasts, rankings, games, molecules. Each function returns a model and its inputs,
each model its loss.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


class Capsules(nn.Module):
    """Vectors vote for vectors, and agree in three rounds."""

    def __init__(self, kinds: int = 8, size: int = 8, classes: int = 10, out: int = 16) -> None:
        super().__init__()
        self.kinds, self.size = kinds, size
        self.see = nn.Conv2d(1, 128, 9)
        self.first = nn.Conv2d(128, kinds * size, 9, 2)
        self.votes = nn.Parameter(torch.randn(kinds * 36, classes, size, out) * 0.1)
        self.again = nn.Sequential(
            nn.Linear(classes * out, 512), nn.ReLU(), nn.Linear(512, 784), nn.Sigmoid()
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(F.relu(self.see(images))).unflatten(1, (self.kinds, self.size))
        x = x.flatten(3).transpose(2, 3).flatten(1, 2)
        x = x * x.norm(dim=-1, keepdim=True) / (1 + x.square().sum(-1, keepdim=True))
        votes = torch.einsum("bis,icso->bico", x, self.votes)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            y = (logits.softmax(2)[..., None] * votes).sum(1)
            square = y.float().square().sum(-1, keepdim=True)
            y = y * square / ((1 + square) * (square + 1e-6).sqrt())
            logits = logits + (votes * y[:, None]).sum(-1)
        length = (y.float().square().sum(-1) + 1e-6).sqrt()
        chosen = F.one_hot(labels, y.shape[1])
        margin = chosen * F.relu(0.9 - length).square() + 0.5 * (1 - chosen) * F.relu(length - 0.1).square()
        made = self.again((y * chosen[..., None]).flatten(1))
        return margin.sum(1).mean() + 0.0005 * F.mse_loss(made.float(), images.flatten(1), reduction="sum")


def capsules() -> Made:
    """128 digits of 28 x 28."""
    return Capsules(), (torch.rand(128, 1, 28, 28), torch.randint(0, 10, (128,)))


class Weather(nn.Module):
    """Maps over time: convolutional gates from map to map, the next map from each."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.Conv2d(4, width, 3, 2, 1)
        self.gates = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.new = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = nn.ConvTranspose2d(width, 4, 4, 2, 1)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        state = maps.new_zeros(len(maps), self.width, maps.shape[-2] // 2, maps.shape[-1] // 2)
        total: Any = 0.0
        for now, then in pairwise(maps.unbind(1)):
            x = F.leaky_relu(self.enter(now), 0.1)
            reset, keep = self.gates(torch.cat([x, state], 1)).sigmoid().chunk(2, 1)
            state = keep * state + (1 - keep) * self.new(torch.cat([x, reset * state], 1)).tanh()
            total = total + F.l1_loss(self.leave(state).float(), then)
        return total


def weather() -> Made:
    """8 series of seven maps of 96 x 96."""
    return Weather(), (torch.randn(8, 7, 4, 96, 96),)


class Speaker(nn.Module):
    """Who speaks: convolutions over time, its mean and deviation, an angle to each with a margin."""

    def __init__(self, width: int = 512, speakers: int = 2000) -> None:
        super().__init__()
        shapes = ((80, width, 5, 1), (width, width, 3, 2), (width, width, 3, 3), (width, width, 1, 1))
        self.frames = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, size, dilation=apart), nn.ReLU(), nn.BatchNorm1d(b))
            for a, b, size, apart in (*shapes, (width, 1500, 1, 1))
        )
        self.leave = nn.Sequential(nn.Linear(3000, 256), nn.BatchNorm1d(256))
        self.speakers = nn.Parameter(torch.randn(speakers, 256))

    def forward(self, sound: torch.Tensor, who: torch.Tensor) -> torch.Tensor:
        x = sound - sound.mean(-1, keepdim=True)
        for frame in self.frames:
            x = frame(x)
        x = x.float()
        x = F.normalize(self.leave(torch.cat([x.mean(-1), x.std(-1)], 1)))
        cosine = F.linear(x, F.normalize(self.speakers)).float()
        return F.cross_entropy(30 * (cosine - 0.2 * F.one_hot(who, cosine.shape[1])), who)


def speaker() -> Made:
    """64 stretches of 300 frames."""
    return Speaker(), (torch.randn(64, 80, 300), torch.randint(0, 2000, (64,)))


class Retention(nn.Module):
    """A language model whose attention decays with distance, without a softmax: chunks and a state."""

    def __init__(self, width: int = 512, heads: int = 4, layers: int = 4, words: int = 16000) -> None:
        super().__init__()
        self.heads, self.chunk = heads, 128
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.mix = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.groups = nn.ModuleList(nn.GroupNorm(heads, width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(layers))
        self.leave = nn.Linear(width, words, bias=False)
        decay = torch.log(1 - 2.0 ** (-5 - torch.arange(heads)))
        place = torch.arange(self.chunk)
        apart = (place[:, None] - place).clamp(min=0)
        self.register_buffer("within", torch.exp(decay[:, None, None] * apart).tril())
        self.register_buffer("since", torch.exp(decay[:, None] * (place + 1))[..., None])
        self.register_buffer("until", torch.exp(decay[:, None] * (self.chunk - 1 - place))[..., None])
        self.register_buffer("whole", torch.exp(decay * self.chunk)[:, None, None])

    def retain(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        parts = [each.unflatten(2, (-1, self.chunk)).unbind(2) for each in (query, key, value)]
        made, state = [], None
        for q, k, v in zip(*parts, strict=True):
            y = ((q @ k.mT) * self.within) @ v
            made.append(y if state is None else y + (q * self.since) @ state)
            more = (k * self.until).mT @ v
            state = more if state is None else self.whole * state + more
        return torch.cat(made, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        layers = zip(self.mix, self.groups, self.out, self.wide, self.narrow, strict=True)
        for i, (mix, group, out, wide, narrow) in enumerate(layers):
            query, key, value, gate = mix(self.norms[2 * i](x)).chunk(4, -1)
            heads = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (query, key, value)]
            y = self.retain(heads[0], heads[1] / math.sqrt(128), heads[2]).transpose(1, 2).flatten(2)
            y = group(y.flatten(0, 1)).view_as(y)
            x = x + out(F.silu(gate) * y)
            up, open_ = wide(self.norms[2 * i + 1](x)).chunk(2, -1)
            x = x + narrow(up * F.gelu(open_))
        return F.cross_entropy(self.leave(self.norms[-1](x)).flatten(0, 1).float(), words[:, 1:].flatten())


def retention() -> Made:
    """8 texts of 512 words."""
    return Retention(), (torch.randint(0, 16000, (8, 513)),)


class Centres(nn.Module):
    """Things as their centres: residual layers down, joined upwards, a map of centres and sizes at them."""

    def __init__(self, width: int = 48, classes: int = 20) -> None:
        super().__init__()

        def conv(a: int, b: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU())

        sizes = [width, 2 * width, 4 * width, 6 * width]
        self.enter = conv(3, width, 2)
        self.down = nn.ModuleList(nn.Sequential(conv(a, b, 2), conv(b, b)) for a, b in pairwise(sizes))
        self.across = nn.ModuleList(nn.Conv2d(a, 64, 1) for a in sizes[1:])
        self.mend = nn.ModuleList(conv(64, 64) for _ in sizes[2:])
        self.heads = nn.ModuleList(nn.Sequential(conv(64, 64), nn.Conv2d(64, out, 1)) for out in (classes, 4))

    def forward(
        self, images: torch.Tensor, maps: torch.Tensor, at: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        x, seen = self.enter(images), []
        for down, across in zip(self.down, self.across, strict=True):
            x = down(x)
            seen.append(across(x))
        x = seen.pop()
        for mend in self.mend:
            x = mend(F.interpolate(x, scale_factor=2, mode="nearest") + seen.pop())
        heat, sizes = (head(x).float() for head in self.heads)
        chance = heat.sigmoid().clamp(1e-4, 1 - 1e-4)
        hit = maps.eq(1)
        focal = torch.where(
            hit, (1 - chance).square() * chance.log(), (1 - maps) ** 4 * chance.square() * (1 - chance).log()
        )
        found = sizes.flatten(2).gather(2, at[:, None].expand(-1, 4, -1))
        return 0.1 * F.l1_loss(found, boxes) - focal.sum() / hit.sum().clamp(min=1)


def centres() -> Made:
    """16 images of 256 x 256, 32 things in each."""
    return Centres(), (
        *(torch.rand(16, 3, 256, 256), torch.rand(16, 20, 64, 64)),
        *(torch.randint(0, 64 * 64, (16, 32)), torch.rand(16, 4, 32)),
    )


class Matches(nn.Module):
    """Two views of a scene: convolutions, layers that look at both, and who belongs to whom."""

    def __init__(self, width: int = 192, layers: int = 2) -> None:
        super().__init__()
        self.see = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.ReLU())
                for a, b in pairwise((1, 64, 128, width))
            )
        )
        self.own = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 2 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.other = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 6, 2 * width, 0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, first: torch.Tensor, second: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        seen = self.see(torch.cat([first, second])).flatten(2).transpose(1, 2)
        one, two = seen.chunk(2)
        for own, other in zip(self.own, self.other, strict=True):
            one, two = own(torch.cat([one, two])).chunk(2)
            one, two = other(one, two), other(two, one)
        alike = torch.einsum("bic,bjc->bij", one, two).float() / (0.1 * one.shape[-1])
        both = alike.log_softmax(1) + alike.log_softmax(2)
        return -both.gather(2, pairs[..., None]).mean()


def matches() -> Made:
    """8 pairs of images of 192 x 192."""
    return Matches(), (
        *(torch.rand(8, 1, 192, 192), torch.rand(8, 1, 192, 192)),
        torch.randint(0, 576, (8, 576)),
    )


class Sets(nn.Module):
    """Sets of vectors, looked at through a few learnt ones; what they become does not depend on the order."""

    def __init__(self, width: int = 256, learnt: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.learnt = nn.Parameter(torch.randn(layers, 1, learnt, width) * 0.1)
        self.into = nn.ModuleList(nn.MultiheadAttention(width, 8, batch_first=True) for _ in range(layers))
        self.back = nn.ModuleList(nn.MultiheadAttention(width, 8, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.leave = nn.Linear(width, 40)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for i, (into, back, mlp) in enumerate(zip(self.into, self.back, self.mlps, strict=True)):
            few = self.learnt[i].expand(len(x), -1, -1)
            few = few + into(few, x, x, need_weights=False)[0]
            x = self.norms[2 * i](x + back(x, few, few, need_weights=False)[0])
            x = self.norms[2 * i + 1](x + mlp(x))
        return F.cross_entropy(self.leave(x.amax(1)), labels)


def sets() -> Made:
    """64 sets of 1024."""
    return Sets(), (torch.randn(64, 1024, 6), torch.randint(0, 40, (64,)))


class Forecast(nn.Module):
    """Series by stacks of layers, each of which explains a part and leaves the rest to the next."""

    def __init__(self, past: int = 336, future: int = 96, width: int = 512, blocks: int = 6) -> None:
        super().__init__()
        self.future = future
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
                *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * 16)),
            )
            for _ in range(blocks)
        )
        for name, length in (("before", past), ("after", future)):
            places = torch.arange(length) / length
            waves = [f(2 * math.pi * i * places) for i in range(8) for f in (torch.sin, torch.cos)]
            self.register_buffer(name, torch.stack(waves))

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        trend = F.avg_pool1d(F.pad(past[:, None], (12, 12), mode="replicate"), 25, 1)[:, 0]
        rest, said = past - trend, trend[:, -1:].expand(-1, self.future)
        for block in self.layers:
            backward, forward = block(rest).chunk(2, -1)
            rest = rest - backward @ self.before.to(backward.dtype)
            said = said + forward @ self.after.to(forward.dtype)
        return (said - future).abs().mean() + 0.1 * rest.float().square().mean()


def forecast() -> Made:
    """8192 series."""
    return Forecast(), (torch.randn(8192, 336), torch.randn(8192, 96))


class Ranking(nn.Module):
    """What is shown: features cross each other, experts that several tasks share, each with its gates."""

    def __init__(self, fields: int = 20, rows: int = 20000, size: int = 16, experts: int = 6) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, size) for _ in range(fields))
        width = fields * size + 13
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
            for _ in range(experts)
        )
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(3))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in range(3)
        )

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, clicks: torch.Tensor) -> torch.Tensor:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        x = first = torch.cat([*found, numbers.abs().log1p()], 1)
        for cross in self.cross:
            x = first * cross(x) + x
        said = torch.stack([expert(x) for expert in self.experts], 1)
        tasks = [
            tower((gate(x).softmax(-1)[..., None] * said).sum(1))
            for gate, tower in zip(self.gates, self.towers, strict=True)
        ]
        return F.binary_cross_entropy_with_logits(torch.cat(tasks, 1).float(), clicks)


def ranking() -> Made:
    """Batch 8192 of 20 categories and 13 numbers."""
    return Ranking(), (
        torch.randint(0, 20000, (8192, 20)),
        torch.randn(8192, 13),
        torch.rand(8192, 3).round(),
    )


class Game(nn.Module):
    """A board: residual blocks with gates over channels, a policy and a value."""

    def __init__(self, width: int = 128, blocks: int = 6) -> None:
        super().__init__()

        def conv(a: int, b: int, size: int = 3) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, size, padding=size // 2, bias=False), nn.BatchNorm2d(b))

        self.enter = conv(18, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(width, width), nn.ReLU(), conv(width, width)) for _ in range(blocks)
        )
        self.gates = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2 * width)) for _ in range(blocks)
        )
        self.policy = nn.Sequential(conv(width, width), nn.ReLU(), nn.Conv2d(width, 73, 1))
        self.value = conv(width, 4, 1)
        self.won = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, boards: torch.Tensor, moves: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(boards))
        for block, gate in zip(self.blocks, self.gates, strict=True):
            y = block(x)
            scale, shift = gate(y.mean((2, 3)))[..., None, None].chunk(2, 1)
            x = F.relu(x + y * scale.sigmoid() + shift)
        chosen = F.cross_entropy(self.policy(x).flatten(1).float(), moves)
        return chosen + F.cross_entropy(self.won(F.relu(self.value(x)).flatten(1)).float(), ends)


def game() -> Made:
    """512 boards of 8 x 8."""
    return Game(), (
        torch.rand(512, 18, 8, 8),
        torch.rand(512, 73 * 64).softmax(-1),
        torch.randint(0, 3, (512,)),
    )


class Molecules(nn.Module):
    """Atoms pass on what they are, weighted by a net of the distance to each of their neighbours."""

    def __init__(self, width: int = 128, waves: int = 50, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.register_buffer("centres", torch.linspace(0, 10, waves))
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(waves, width), nn.Softplus(), nn.Linear(width, width))
            for _ in range(layers)
        )
        self.into = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width))
            for _ in range(layers)
        )
        self.leave = nn.Sequential(nn.Linear(width, 64), nn.Softplus(), nn.Linear(64, 1))

    def forward(
        self, atoms: torch.Tensor, places: torch.Tensor, near: torch.Tensor, energy: torch.Tensor
    ) -> torch.Tensor:
        count, neighbours = near.shape[1:]
        flat = near.flatten(1)[..., None]
        other = places.gather(1, flat.expand(-1, -1, 3)).unflatten(1, (count, neighbours))
        apart = (other - places[:, :, None]).norm(dim=-1)
        waves = torch.exp(-10 * (apart[..., None] - self.centres).square())
        fade = 0.5 * (torch.cos(math.pi * apart.clamp(max=5) / 5) + 1)
        x = self.embed(atoms)
        for net, into, out in zip(self.filters, self.into, self.out, strict=True):
            weight = net(waves) * fade[..., None]
            seen = into(x).gather(1, flat.expand(-1, -1, x.shape[-1])).unflatten(1, (count, neighbours))
            x = x + out((seen * weight).sum(2))
        return F.mse_loss(self.leave(x).float().sum((1, 2)), energy)


def molecules() -> Made:
    """64 molecules of 64 atoms, 24 neighbours of each."""
    return Molecules(), (
        *(torch.randint(0, 100, (64, 64)), 4 * torch.rand(64, 64, 3)),
        *(torch.randint(0, 64, (64, 64, 24)), torch.randn(64)),
    )
