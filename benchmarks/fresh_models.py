"""Models whose compiled steps were predicted before they were measured, after those of ``other_models.py``
had set what compiled code takes of the host: agents, prototypes, distances in attention, sentences, images
made up, depths, skeletons, dynamics, records. Each function returns a model and its inputs, each model its
loss.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


class Agent(nn.Module):
    """What actions are worth on a screen, by a value and advantages, against what an older net says."""

    def __init__(self, actions: int = 18) -> None:
        super().__init__()

        def net() -> nn.ModuleDict:
            shapes = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
            convs = [each for a, b, size, s in shapes for each in (nn.Conv2d(a, b, size, s), nn.ReLU())]
            return nn.ModuleDict(
                {
                    "see": nn.Sequential(*convs, nn.Flatten()),
                    "value": nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1)),
                    "more": nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions)),
                }
            )

        self.now, self.before = net(), net().requires_grad_(False)

    @staticmethod
    def worth(net: nn.ModuleDict, screens: torch.Tensor) -> torch.Tensor:
        x = net["see"](screens / 255)
        more = net["more"](x)
        return net["value"](x) + more - more.mean(1, keepdim=True)

    def forward(
        self, now: torch.Tensor, then: torch.Tensor, action: torch.Tensor, gained: torch.Tensor
    ) -> torch.Tensor:
        said = self.worth(self.now, now).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            best = self.worth(self.now, then).argmax(1, keepdim=True)
            wanted = gained + 0.99 * self.worth(self.before, then).gather(1, best)[:, 0]
        return F.smooth_l1_loss(said.float(), wanted.float())


def agent() -> Made:
    """256 screens of 84 x 84, four pictures each."""
    return Agent(), (
        *(255 * torch.rand(256, 4, 84, 84), 255 * torch.rand(256, 4, 84, 84)),
        *(torch.randint(0, 18, (256,)), torch.randn(256)),
    )


class Prototypes(nn.Module):
    """Few pictures of each kind make a point, and others belong to the nearest."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.see = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(a, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
                )
                for a in (3, width, width, width)
            ),
            nn.Flatten(),
        )

    def forward(self, shown: torch.Tensor, asked: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        ways, shots = shown.shape[:2]
        seen = self.see(torch.cat([shown.flatten(0, 1), asked]))
        points = seen[: ways * shots].unflatten(0, (ways, shots)).mean(1)
        apart = (seen[ways * shots :, None] - points).float().square().sum(-1)
        return F.cross_entropy(-apart, kinds)


def prototypes() -> Made:
    """20 kinds of five pictures of 84 x 84, 100 others."""
    return Prototypes(), (
        torch.rand(20, 5, 3, 84, 84),
        torch.rand(100, 3, 84, 84),
        torch.randint(0, 20, (100,)),
    )


class Distances(nn.Module):
    """A decoder whose attention, written out, falls with distance, each head's at its own rate."""

    def __init__(self, width: int = 640, heads: int = 10, layers: int = 3, words: int = 8000) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        place = torch.arange(384)
        slopes = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)
        later = torch.full((384, 384), float("-inf")).triu(1)
        self.register_buffer("bias", slopes[:, None, None] * (place - place[:, None]).clamp(max=0) + later)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for i, mix in enumerate(self.mix):
            query, key, value = (
                each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for each in mix(self.norms[2 * i](x)).chunk(3, -1)
            )
            scores = query @ key.mT * query.shape[-1] ** -0.5 + self.bias
            y = scores.float().softmax(-1).to(value.dtype) @ value
            x = x + self.out[i](y.transpose(1, 2).flatten(2))
            x = x + self.narrow[i](F.relu(self.wide[i](self.norms[2 * i + 1](x))).square())
        said = F.linear(self.norms[-1](x), self.embed.weight)
        return F.cross_entropy(said.flatten(0, 1).float(), words[:, 1:].flatten())


def distances() -> Made:
    """16 texts of 384 words."""
    return Distances(), (torch.randint(0, 8000, (16, 385)),)


class Sentences(nn.Module):
    """Sentences by filters of several widths over their words, and the most of each."""

    def __init__(self, words: int = 30000, width: int = 300, filters: int = 128, labels: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.filters = nn.ModuleList(nn.Conv1d(width, filters, size) for size in (2, 3, 4, 5))
        self.deeper = nn.Sequential(nn.Linear(4 * filters, 256), nn.ReLU(), nn.Dropout(0.3))
        self.leave = nn.Linear(256, labels)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(words), 0.2, self.training).transpose(1, 2)
        most = [F.relu(conv(x)).amax(-1) for conv in self.filters]
        return F.binary_cross_entropy_with_logits(self.leave(self.deeper(torch.cat(most, 1))).float(), labels)


def sentences() -> Made:
    """256 sentences of 64 words."""
    return Sentences(), (torch.randint(0, 30000, (256, 64)), torch.rand(256, 20).round())


class Imagined(nn.Module):
    """Images as a few random numbers each, and images made of these."""

    def __init__(self, width: int = 32, size: int = 128) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]

        def layer(conv: nn.Module, out: int) -> nn.Sequential:
            return nn.Sequential(conv, nn.GroupNorm(8, out), nn.SiLU())

        down = ((3, widths[0]), *pairwise(widths))
        self.down = nn.Sequential(*(layer(nn.Conv2d(a, b, 4, 2, 1), b) for a, b in down))
        self.told = nn.Linear(widths[-1] * 16, 2 * size)
        self.back = nn.Linear(size, widths[-1] * 16)
        up = pairwise(reversed(widths))
        self.up = nn.Sequential(*(layer(nn.ConvTranspose2d(a, b, 4, 2, 1), b) for a, b in up))
        self.leave = nn.ConvTranspose2d(width, 3, 4, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, width = self.told(self.down(images).flatten(1)).float().chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * width).exp()
        made = self.leave(self.up(self.back(drawn).unflatten(1, (-1, 4, 4))))
        odds = -0.5 * (1 + width - mean.square() - width.exp()).sum(1).mean()
        return F.mse_loss(made.float().sigmoid(), images, reduction="sum") / len(images) + odds


def imagined() -> Made:
    """256 images of 64 x 64."""
    return Imagined(), (torch.rand(256, 3, 64, 64),)


class Depths(nn.Module):
    """Two views: how alike they are at each shift, smoothed, and the mean shift of each place."""

    def __init__(self, width: int = 32, shifts: int = 24) -> None:
        super().__init__()
        self.shifts = shifts

        def layer(a: int, b: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

        self.see = nn.Sequential(layer(3, width, 2), layer(width, width, 2), layer(width, 2 * width))
        self.smooth = nn.Sequential(layer(shifts, 64), layer(64, 64), nn.Conv2d(64, shifts, 3, padding=1))

    def forward(self, left: torch.Tensor, right: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        one, two = self.see(torch.cat([left, right])).chunk(2)
        wide = F.pad(two, (self.shifts, 0))
        alike = [(one * wide[..., self.shifts - i : wide.shape[-1] - i]).mean(1) for i in range(self.shifts)]
        x = torch.stack(alike, 1)
        chance = (x + self.smooth(x)).float().softmax(1)
        shift = (chance * torch.arange(self.shifts, device=x.device)[:, None, None]).sum(1, keepdim=True)
        return F.smooth_l1_loss(F.interpolate(shift, scale_factor=4.0, mode="bilinear"), depth)


def depths() -> Made:
    """8 pairs of images of 192 x 384."""
    return Depths(), (
        *(torch.rand(8, 3, 192, 384), torch.rand(8, 3, 192, 384)),
        24 * torch.rand(8, 1, 192, 384),
    )


class Skeletons(nn.Module):
    """What bodies do: joints pass on along a skeleton, and frames over time."""

    def __init__(self, joints: int = 25, classes: int = 60) -> None:
        super().__init__()
        self.register_buffer("near", torch.rand(3, joints, joints).softmax(-1))
        self.weight = nn.Parameter(torch.ones(4, 3, joints, joints))
        shapes = ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 256, 2))
        self.spread = nn.ModuleList(nn.Conv2d(a, 3 * b, 1) for a, b, _ in shapes)
        self.time = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, (9, 1), (s, 1), (4, 0)), nn.BatchNorm2d(b)),
                nn.Dropout(0.1),
            )
            for _, b, s in shapes
        )
        self.beside = nn.ModuleList(nn.Conv2d(a, b, 1, (s, 1)) for a, b, s in shapes)
        self.leave = nn.Linear(256, classes)

    def forward(self, bodies: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = bodies
        for i, (spread, time, beside) in enumerate(zip(self.spread, self.time, self.beside, strict=True)):
            parts = spread(x).unflatten(1, (3, -1))
            y = torch.einsum("nkctv,kvw->nctw", parts, self.near * self.weight[i])
            x = F.relu(time(y) + beside(x))
        return F.cross_entropy(self.leave(x.mean((2, 3))), labels)


def skeletons() -> Made:
    """32 films of 128 frames of 25 joints."""
    return Skeletons(), (torch.randn(32, 3, 128, 25), torch.randint(0, 60, (32,)))


class Dynamics(nn.Module):
    """Motion by a net that tells velocities, in eight steps of fourth order."""

    def __init__(self, size: int = 24, width: int = 256) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, size))
        )

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for then in places.unbind(1):
            a = self.net(x)
            b = self.net(x + 0.05 * a)
            c = self.net(x + 0.05 * b)
            d = self.net(x + 0.1 * c)
            x = x + 0.1 / 6 * (a + 2 * b + 2 * c + d).float()
            total = total + F.mse_loss(x, then)
        return total


def dynamics() -> Made:
    """4096 bodies, eight moments."""
    return Dynamics(), (torch.randn(4096, 24), torch.randn(4096, 8, 24))


class Records(nn.Module):
    """Rows of numbers, of which each step looks at some, by what those before left."""

    def __init__(self, size: int = 64, width: int = 128, steps: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)

        def gated(a: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(a, 2 * width, bias=False), nn.BatchNorm1d(2 * width), nn.GLU(1))

        self.shared = gated(size)
        self.own = nn.ModuleList(nn.ModuleList((gated(width), gated(width))) for _ in range(steps))
        self.look = nn.ModuleList(
            nn.Sequential(nn.Linear(width // 2, size, bias=False), nn.BatchNorm1d(size)) for _ in range(steps)
        )
        self.leave = nn.Linear(width // 2, 8)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.norm(rows)
        prior, x = torch.ones_like(rows), rows
        said: Any = 0.0
        spent: Any = 0.0
        for own, look in zip(self.own, self.look, strict=True):
            y = self.shared(x)
            for each in own:
                y = (y + each(y)) * 0.5**0.5
            out, kept = y.chunk(2, 1)
            said = said + F.relu(out)
            mask = (look(kept) * prior).float().softmax(-1)
            prior = prior * (1.3 - mask)
            spent = spent - (mask * (mask + 1e-6).log()).sum(1).mean()
            x = mask * rows
        return F.cross_entropy(self.leave(said), labels) + 1e-3 * spent


def records() -> Made:
    """16,384 rows of 64 numbers."""
    return Records(), (torch.randn(16384, 64), torch.randint(0, 8, (16384,)))
