"""Models whose compiled steps were predicted before they were measured, and which set nothing of the model.

Kinds that the models of ``compiled_models.py`` are not of: routing, radiance fields, attention over edges,
flows, contrastive losses, spectral operators, scans, images of three dimensions, reinforcement learning, time
steps written in Python, bags of embeddings, codebooks. Each function returns a model and its inputs; all but
one return their loss.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


class Experts(nn.Module):
    """A feed-forward layer whose tokens each go to one of several networks, as many as each has room for."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, experts, bias=False)
        self.wide = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.narrow = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        experts = self.wide.shape[0]
        room = 2 * len(tokens) // experts
        chance, chosen = self.route(tokens).softmax(-1).max(-1)
        place = F.one_hot(chosen, experts).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
        slot = torch.where(place < room, chosen * room + place, experts * room)
        sent = tokens.new_zeros(experts * room + 1, tokens.shape[1]).index_copy(0, slot, tokens)
        inside = F.gelu(torch.bmm(sent[:-1].view(experts, room, -1), self.wide))
        made = torch.bmm(inside, self.narrow).flatten(0, 1)
        made = torch.cat([made, made.new_zeros(1, made.shape[1])])
        return (chance[:, None] * made[slot]).view_as(x)


class Routed(nn.Module):
    """A language model with routed feed-forward layers."""

    def __init__(self, width: int = 512, layers: int = 4, experts: int = 8, vocabulary: int = 16000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.leave = nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for first, second, mix, experts in zip(
            self.norms[::2], self.norms[1::2], self.mix, self.experts, strict=True
        ):
            q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in mix(first(x)).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + experts(second(x))
        return F.cross_entropy(self.leave(x).flatten(0, 1), words[:, 1:].flatten())


def routed() -> Made:
    """16 sequences of 512 words."""
    return Routed(), (torch.randint(0, 16000, (16, 513)),)


class Field(nn.Module):
    """A radiance field: sines of positions, a network with a skip, colours composed along each ray."""

    def __init__(self, width: int = 256, octaves: int = 10) -> None:
        super().__init__()
        self.register_buffer("scales", 2.0 ** torch.arange(octaves) * math.pi)
        entering = 3 * (2 * octaves + 1)
        inputs = [entering, *[width] * 3, width + entering, *[width] * 3]
        self.layers = nn.ModuleList(nn.Linear(each, width) for each in inputs)
        self.density = nn.Linear(width, 1)
        self.colour = nn.Sequential(nn.Linear(width + 3, width // 2), nn.ReLU(), nn.Linear(width // 2, 3))

    def forward(self, points: torch.Tensor, directions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        angles = (points[..., None] * self.scales).flatten(-2)
        entering = torch.cat([points, angles.sin(), angles.cos()], dim=-1)
        x = entering
        for index, layer in enumerate(self.layers):
            x = torch.cat([x, entering], dim=-1) if index == 4 else x
            x = layer(x).relu()
        opacity = 1 - torch.exp(-F.softplus(self.density(x)[..., 0].float()) * 0.02)
        left = torch.cumprod(1 - opacity + 1e-6, dim=1)
        weight = opacity * torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], dim=1)
        towards = directions[:, None].expand(-1, points.shape[1], -1)
        colour = self.colour(torch.cat([x, towards], dim=-1)).sigmoid()
        return F.mse_loss((weight[..., None] * colour).sum(1), seen)


def field() -> Made:
    """4096 rays of 64 points."""
    return Field(), (torch.rand(4096, 64, 3), torch.randn(4096, 3), torch.rand(4096, 3))


class EdgeAttention(nn.Module):
    """Graph attention: the weight of an edge is a softmax over all edges into its node."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.enter = nn.Linear(100, width)
        self.value = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.towards = nn.ModuleList(nn.Linear(width, 2 * heads, bias=False) for _ in range(layers))
        self.leave = nn.Linear(width, 40)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source, target = edges
        x = self.enter(nodes)
        for value, towards in zip(self.value, self.towards, strict=True):
            v = value(x).unflatten(-1, (self.heads, -1)).float()
            sent, received = towards(x).float().chunk(2, -1)
            score = F.leaky_relu(sent[source] + received[target], 0.2).clamp(max=30).exp()
            total = torch.zeros_like(sent).index_add(0, target, score)
            weight = score / (total[target] + 1e-6)
            x = torch.zeros_like(v).index_add(0, target, v[source] * weight[..., None]).flatten(1)
            x = F.elu(x)
        return F.cross_entropy(self.leave(x), labels)


def edge_attention() -> Made:
    """30,000 nodes, 300,000 edges."""
    edges = torch.randint(0, 30_000, (2, 300_000))
    return EdgeAttention(), (torch.randn(30_000, 100), edges, torch.randint(0, 40, (30_000,)))


class Flow(nn.Module):
    """Affine coupling layers and the likelihood of what they make of data."""

    def __init__(self, features: int = 64, width: int = 512, layers: int = 8) -> None:
        super().__init__()
        half = features // 2
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(half, width),
                nn.SiLU(),
                nn.Linear(width, width),
                nn.SiLU(),
                nn.Linear(width, features),
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        likelihood = x.new_zeros(len(x))
        for network in self.networks:
            kept, changed = x.chunk(2, -1)
            scale, shift = network(kept).float().chunk(2, -1)
            scale = scale.tanh()
            x = torch.cat([changed * scale.exp() + shift, kept], dim=-1)
            likelihood = likelihood + scale.sum(-1)
        return (0.5 * x.square().sum(-1) - likelihood).mean()


def flow() -> Made:
    """32,768 vectors of 64."""
    return Flow(), (torch.randn(32768, 64),)


class Pairs(nn.Module):
    """Two towers and a contrastive loss over all pairs of a batch."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(entering, 2 * width),
                nn.GELU(),
                nn.LayerNorm(2 * width),
                nn.Linear(2 * width, width),
            )
            for entering in (768, 1024)
        )
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        a, b = (F.normalize(tower(x), dim=-1) for tower, x in zip(self.towers, (left, right), strict=True))
        scores = self.scale.exp() * a @ b.T
        same = torch.arange(len(scores), device=scores.device)
        return 0.5 * (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same))


def pairs() -> Made:
    """Batch 8192."""
    return Pairs(), (torch.randn(8192, 768), torch.randn(8192, 1024))


class Spectral(nn.Module):
    """A Fourier neural operator: low frequencies are multiplied by learnt complex weights."""

    def __init__(self, width: int = 32, modes: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.enter = nn.Conv2d(3, width, 1)
        self.weights = nn.ParameterList(
            torch.randn(2, width, width, modes, modes, 2) / width**2 for _ in range(layers)
        )
        self.beside = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.leave = nn.Sequential(nn.Conv2d(width, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        m = self.modes
        for weight, beside in zip(self.weights, self.beside, strict=True):
            waves = torch.fft.rfft2(x.float())
            low, high = torch.view_as_complex(weight)
            made = torch.zeros_like(waves)
            made[..., :m, :m] = torch.einsum("bixy,ioxy->boxy", waves[..., :m, :m], low)
            made[..., -m:, :m] = torch.einsum("bixy,ioxy->boxy", waves[..., -m:, :m], high)
            x = F.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + beside(x))
        return F.mse_loss(self.leave(x).float(), wanted)


def spectral() -> Made:
    """32 fields of 128 x 128."""
    return Spectral(), (torch.randn(32, 3, 128, 128), torch.randn(32, 1, 128, 128))


class Scan(nn.Module):
    """Gated linear recurrences, each as two cumulative sums, between gated layers."""

    def __init__(self, width: int = 512, layers: int = 4, vocabulary: int = 8192) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.enter = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.conv = nn.ModuleList(nn.Conv1d(width, width, 4, padding=3, groups=width) for _ in range(layers))
        self.leave = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.score = nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for norm, enter, conv, leave in zip(self.norms, self.enter, self.conv, self.leave, strict=True):
            value, decay, gate = enter(norm(x)).chunk(3, -1)
            value = F.silu(conv(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            fall = (-0.01 * F.softplus(decay.float())).cumsum(1)
            state = (value.float() * (-fall).exp()).cumsum(1) * fall.exp()
            x = x + leave(state.to(value.dtype) * F.silu(gate))
        return F.cross_entropy(self.score(x).flatten(0, 1), words[:, 1:].flatten())


def scan() -> Made:
    """8 sequences of 1024 words."""
    return Scan(), (torch.randint(0, 8192, (8, 1025)),)


class Volumes(nn.Module):
    """A U-Net of volumes with instance norms, and a Dice loss."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 4) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Sequential:
            conv = nn.Conv3d(a, b, 3, padding=1, bias=False)
            return nn.Sequential(conv, nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01))

        self.down = nn.ModuleList(block(a, b) for a, b in pairwise((1, *widths)))
        pairs = [*pairwise(widths)][::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(block(2 * a, a) for a, _ in pairs)
        self.leave = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.down:
            x = block(F.max_pool3d(x, 2) if skips else x)
            skips.append(x)
        for grow, block, skip in zip(self.grow, self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([grow(x), skip], dim=1))
        chance = self.leave(x).float().softmax(1)
        truth = F.one_hot(labels, chance.shape[1]).movedim(-1, 1)
        both = (chance * truth).sum((2, 3, 4))
        return 1 - (2 * both / (chance.sum((2, 3, 4)) + truth.sum((2, 3, 4)) + 1)).mean()


def volumes() -> Made:
    """2 volumes of 96 x 96 x 96."""
    return Volumes(), (torch.randn(2, 1, 96, 96, 96), torch.randint(0, 4, (2, 96, 96, 96)))


class Policy(nn.Module):
    """The clipped objective of an actor and a critic, small enough that the host limits it."""

    def __init__(self, state: int = 64, actions: int = 8, width: int = 256) -> None:
        super().__init__()

        def network(out: int) -> nn.Sequential:
            layers = [
                layer
                for a, b in pairwise((state, width, width, width))
                for layer in (nn.Linear(a, b), nn.Tanh())
            ]
            return nn.Sequential(*layers, nn.Linear(width, out))

        self.actor, self.critic = network(actions), network(1)
        self.spread = nn.Parameter(torch.zeros(actions))

    def forward(
        self, states: torch.Tensor, taken: torch.Tensor, before: torch.Tensor, gains: torch.Tensor
    ) -> torch.Tensor:
        mean = self.actor(states).float()
        away = (taken - mean) * torch.exp(-self.spread)
        chance = -0.5 * (away.square() + math.log(2 * math.pi)).sum(-1) - self.spread.sum()
        ratio = torch.exp(chance - before)
        better = (gains - gains.mean()) / (gains.std() + 1e-8)
        actor = -torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
        critic = F.smooth_l1_loss(self.critic(states).float().squeeze(-1), gains)
        return actor + 0.5 * critic - 0.01 * self.spread.sum()


def policy() -> Made:
    """Batch 4096."""
    rest = (torch.randn(4096, 8), torch.randn(4096), torch.randn(4096))
    return Policy(), (torch.randn(4096, 64), *rest)


class Unrolled(nn.Module):
    """A gated recurrence whose time steps are written in Python, with attention over what it has seen."""

    def __init__(self, width: int = 256, vocabulary: int = 4000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.gates = nn.Linear(2 * width, 2 * width)
        self.new = nn.Linear(2 * width, width)
        self.leave = nn.Linear(2 * width, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        state = x.new_zeros(len(x), x.shape[-1])
        states = []
        for now in x.unbind(1):
            reset, update = self.gates(torch.cat([now, state], -1)).sigmoid().chunk(2, -1)
            new = self.new(torch.cat([now, reset * state], -1)).tanh()
            state = torch.lerp(state.to(new.dtype), new, update)
            states.append(state)
        seen = torch.stack(states, 1)
        near = F.scaled_dot_product_attention(seen[:, None], seen[:, None], seen[:, None], is_causal=True)
        return F.cross_entropy(
            self.leave(torch.cat([seen, near[:, 0]], -1)).flatten(0, 1), words[:, 1:].flatten()
        )


def unrolled() -> Made:
    """64 sequences of 24 words."""
    return Unrolled(), (torch.randint(0, 4000, (64, 25)),)


class Bags(nn.Module):
    """Bags of categories, and the dot products of all pairs of features (as in DLRM)."""

    def __init__(self, rows: int = 100_000, fields: int = 16, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(fields))
        self.dense = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.register_buffer("places", torch.tril_indices(fields + 1, fields + 1, -1))
        self.top = nn.Sequential(
            nn.Linear(width + self.places.shape[1], 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()
        )
        self.leave = nn.Linear(256, 1)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        dense = self.dense(numbers)
        found = [bag(each).to(dense.dtype) for bag, each in zip(self.bags, categories.unbind(1), strict=True)]
        features = torch.stack([dense, *found], 1)
        dots = torch.bmm(features, features.transpose(1, 2))
        x = torch.cat([dense, dots[:, self.places[0], self.places[1]]], -1)
        return F.binary_cross_entropy_with_logits(self.leave(self.top(x)).squeeze(-1).float(), clicked)


def bags() -> Made:
    """Batch 8192 of 16 bags of 5."""
    categories = torch.randint(0, 100_000, (8192, 16, 5))
    return Bags(), (torch.randn(8192, 13), categories, torch.rand(8192))


class Codebook(nn.Module):
    """An autoencoder of images whose code is the nearest row of a table."""

    def __init__(self, width: int = 128, codes: int = 1024, code: int = 64) -> None:
        super().__init__()

        def rest() -> nn.Sequential:
            return nn.Sequential(
                nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1)
            )

        self.enter = nn.Sequential(
            nn.Conv2d(3, width // 2, 4, 2, 1), nn.ReLU(), nn.Conv2d(width // 2, width, 4, 2, 1)
        )
        self.inside = nn.ModuleList(rest() for _ in range(4))
        self.narrow, self.wide = nn.Conv2d(width, code, 1), nn.Conv2d(code, width, 3, padding=1)
        self.table = nn.Embedding(codes, code)
        self.leave = nn.Sequential(
            nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width // 2, 3, 4, 2, 1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        for layer in self.inside[:2]:
            x = x + layer(x)
        code = self.narrow(x).movedim(1, -1).float()
        table = self.table.weight
        far = code.square().sum(-1, keepdim=True) - 2 * code @ table.T + table.square().sum(-1)
        found = self.table(far.argmin(-1))
        x = self.wide((code + (found - code).detach()).movedim(-1, 1))
        for layer in self.inside[2:]:
            x = x + layer(x)
        committed = F.mse_loss(found, code.detach()) + 0.25 * F.mse_loss(code, found.detach())
        return F.mse_loss(self.leave(x).float(), images) + committed


def codebook() -> Made:
    """64 images of 128 x 128."""
    return Codebook(), (torch.randn(64, 3, 128, 128),)
