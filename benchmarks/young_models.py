"""Models whose compiled steps were predicted before they were measured, after tiny ones had shown what the
host does around a step's kernels (``compiled_host.py``): ratings by factors and a network (NeuMF), two towers
with samples of the batch, sines as activations (SIREN), sums over sets (Deep Sets), means over neighbours
(GraphSAGE), words by their neighbours (skip-grams), mixtures of densities, networks made by a network,
receptance (RWKV), a vision transformer with registers, tables by attention (TabTransformer), soft experts,
queries of a detector (DETR), a U-Net with gates, questions about images (FiLM), windows and grids (MaxViT).
Each function returns a model and its inputs, each model its loss.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    made = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*made[:-1])


class Factors(nn.Module):
    """Whether somebody takes something: products of factors, and a network of other factors (NeuMF)."""

    def __init__(self, users: int = 60_000, items: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_deep, self.item_deep = nn.Embedding(users, width), nn.Embedding(items, width)
        self.net = nn.Sequential(layers(2 * width, 64, 32, 16), nn.ReLU())
        self.head = nn.Linear(width + 16, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        product = self.user(user) * self.item(item)
        deep = self.net(torch.cat([self.user_deep(user), self.item_deep(item)], 1))
        said = self.head(torch.cat([product, deep], 1))[:, 0]
        return F.binary_cross_entropy_with_logits(said.float(), taken)


def factors() -> Made:
    """Batch 4096."""
    return Factors(), (
        *(torch.randint(0, 60_000, (4096,)), torch.randint(0, 20_000, (4096,))),
        torch.rand(4096).round(),
    )


class Towers(nn.Module):
    """What was seen last, averaged, against an item and its kind; the batch's other items are wrong, less
    so the more frequent they are."""

    def __init__(self, items: int = 50_000, kinds: int = 300, width: int = 64) -> None:
        super().__init__()
        self.items, self.kinds = nn.Embedding(items, width), nn.Embedding(kinds, width)
        self.asks, self.answers = layers(width + 16, 256, 128), layers(2 * width, 256, 128)

    def forward(
        self,
        seen: torch.Tensor,
        about: torch.Tensor,
        item: torch.Tensor,
        kind: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        asked = self.asks(torch.cat([self.items(seen).mean(1), about], 1))
        offered = self.answers(torch.cat([self.items(item), self.kinds(kind)], 1))
        asked, offered = F.normalize(asked.float(), dim=1), F.normalize(offered.float(), dim=1)
        scores = asked @ offered.T / 0.05 - frequency.log()
        return F.cross_entropy(scores.float(), torch.arange(len(item), device=item.device))


def towers() -> Made:
    """Batch 1024, of 20 items each."""
    return Towers(), (
        *(torch.randint(0, 50_000, (1024, 20)), torch.randn(1024, 16)),
        *(torch.randint(0, 50_000, (1024,)), torch.randint(0, 300, (1024,))),
        torch.rand(1024) + 0.01,
    )


class Sines(nn.Module):
    """A picture as a function of the place, by sines (SIREN)."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        sizes = (2, *(width for _ in range(depth)))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, 3)

    def forward(self, places: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
        x = places
        for layer in self.layers:
            x = (30 * layer(x)).sin()
        return F.mse_loss(self.head(x).float(), colours)


def sines() -> Made:
    """16,384 places."""
    return Sines(), (2 * torch.rand(16_384, 2) - 1, torch.rand(16_384, 3))


class Sums(nn.Module):
    """Sets by the sum over their members (Deep Sets)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.each, self.all = layers(16, width, width, width), layers(width, width, width, 1)

    def forward(self, members: torch.Tensor, there: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        whole = (self.each(members) * there[..., None]).sum(1)
        return F.huber_loss(self.all(whole)[:, 0].float(), wanted)


def sums() -> Made:
    """256 sets of up to 64."""
    return Sums(), (torch.randn(256, 64, 16), (torch.rand(256, 64) < 0.6).float(), torch.randn(256))


class Sage(nn.Module):
    """Nodes by themselves and the mean of their neighbours (GraphSAGE)."""

    def __init__(self, inputs: int = 128, width: int = 128, classes: int = 47) -> None:
        super().__init__()
        sizes = (inputs, width, classes)
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.near = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(
        self, nodes: torch.Tensor, edges: torch.Tensor, degrees: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        x = nodes
        for i, (own, near) in enumerate(zip(self.own, self.near, strict=True)):
            mean = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / degrees[:, None]
            x = (own(x) + near(mean)).float()
            x = F.dropout(F.normalize(x.relu(), dim=1), 0.5, self.training) if i == 0 else x
        return F.cross_entropy(x, labels)


def sage() -> Made:
    """10,000 nodes, 80,000 edges."""
    edges = torch.randint(0, 10_000, (2, 80_000))
    degrees = torch.bincount(edges[1], minlength=10_000).clamp(min=1).float()
    return Sage(), (torch.randn(10_000, 128), edges, degrees, torch.randint(0, 47, (10_000,)))


class SkipGrams(nn.Module):
    """Words by what stands near them, against words by chance."""

    def __init__(self, words: int = 40_000, width: int = 128) -> None:
        super().__init__()
        self.inside, self.outside = nn.Embedding(words, width), nn.Embedding(words, width)

    def forward(self, word: torch.Tensor, near: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        x = self.inside(word)
        good = (x * self.outside(near)).sum(1)
        bad = torch.bmm(self.outside(chance), x[:, :, None])[..., 0]
        return -(F.logsigmoid(good.float()) + F.logsigmoid(-bad.float()).sum(1)).mean()


def skip_grams() -> Made:
    """Batch 8192, five words by chance for each."""
    return SkipGrams(), (
        *(torch.randint(0, 40_000, (8192,)), torch.randint(0, 40_000, (8192,))),
        torch.randint(0, 40_000, (8192, 5)),
    )


class Mixture(nn.Module):
    """A density of several normal ones, told by a network."""

    def __init__(self, inputs: int = 24, outputs: int = 4, parts: int = 8, width: int = 256) -> None:
        super().__init__()
        self.parts = parts
        self.net = nn.Sequential(layers(inputs, width, width), nn.Tanh())
        self.weight = nn.Linear(width, parts)
        self.mean, self.spread = (nn.Linear(width, parts * outputs) for _ in range(2))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        weight = self.weight(x).float().log_softmax(1)
        mean, spread = (head(x).float().unflatten(1, (self.parts, -1)) for head in (self.mean, self.spread))
        off = (wanted[:, None] - mean) * torch.exp(-spread)
        likely = -(0.5 * off.square() + spread).sum(2)
        return -torch.logsumexp(weight + likely, 1).mean()


def mixture() -> Made:
    """Batch 2048."""
    return Mixture(), (torch.randn(2048, 24), torch.randn(2048, 4))


class MadeNetworks(nn.Module):
    """A network makes another of what a few examples say, which answers for that task (a hypernetwork)."""

    def __init__(self, width: int = 128, hidden: int = 32) -> None:
        super().__init__()
        self.hidden = hidden
        self.see, self.tell = layers(9, width, width), layers(width, width, width)
        self.first, self.second = (nn.Linear(width, n) for n in ((8 + 1) * hidden, (hidden + 1)))

    def forward(
        self, given: torch.Tensor, said: torch.Tensor, asked: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        task = self.tell(self.see(torch.cat([given, said], 2)).mean(1))
        first = self.first(task).unflatten(1, (9, self.hidden))
        second = self.second(task)[..., None]
        x = (torch.bmm(asked, first[:, :-1]) + first[:, -1:]).relu()
        x = torch.bmm(x, second[:, :-1]) + second[:, -1:]
        return F.mse_loss(x[..., 0].float(), wanted)


def made_networks() -> Made:
    """128 tasks of 32 examples and 64 questions."""
    return MadeNetworks(), (
        *(torch.randn(128, 32, 8), torch.randn(128, 32, 1)),
        *(torch.randn(128, 64, 8), torch.randn(128, 64)),
    )


class Receptance(nn.Module):
    """A layer that mixes with the moment before, and keeps keys and values that fade by channel, in chunks
    (as in RWKV)."""

    def __init__(self, width: int, heads: int, chunk: int = 32) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.shares = nn.Parameter(torch.rand(5, width))
        self.read, self.key, self.value, self.gate, self.leave = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        self.fading = nn.Parameter(torch.linspace(-6, -3, width).unflatten(0, (heads, -1)))
        self.now = nn.Parameter(torch.zeros(heads, width // heads))
        self.norm = nn.GroupNorm(heads, width)
        self.mixed, self.wide = nn.Parameter(torch.rand(width)), nn.Linear(width, 3 * width, bias=False)
        self.narrow = nn.Linear(3 * width, width, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def remembered(self, read: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Of chunks (batch, head, chunk, moment, channel)."""
        fading = self.fading.float().exp()[:, None, None]
        moments = torch.arange(self.chunk, device=read.device)[:, None]
        since, left = torch.exp(-fading * moments), torch.exp(-fading * (self.chunk - 1 - moments))
        near = (read * since) @ (key * torch.exp(fading * (moments + 1))).mT
        own = (read * self.now[:, None, None] * key).sum(-1, keepdim=True)
        state, states = torch.zeros_like(key[:, :, 0].mT @ value[:, :, 0]), []
        whole = torch.exp(-fading[:, 0, 0, :, None] * self.chunk)
        made = (key * left).mT @ value
        for i in range(read.shape[2]):
            states.append(state)
            state = state * whole + made[:, :, i]
        return near.tril(-1) @ value + own * value + (read * since) @ torch.stack(states, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        before = F.pad(y, (0, 0, 1, -1))
        read, key, value, gate = (
            net(torch.lerp(before, y, share))
            for net, share in zip((self.read, self.key, self.value, self.gate), self.shares[:4], strict=True)
        )
        parts = (
            each.unflatten(2, (self.heads, -1)).unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4).float()
            for each in (read, key, value)
        )
        kept = self.remembered(*parts).permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)
        kept = self.norm(kept.flatten(0, 1)).view_as(kept)
        x = x + self.leave(kept * F.silu(gate))
        y = self.norms[1](x)
        y = torch.lerp(F.pad(y, (0, 0, 1, -1)), y, self.mixed)
        return x + self.narrow(self.wide(y).relu().square())


class ReceptanceModel(nn.Module):
    def __init__(self, width: int = 512, depth: int = 3, words: int = 12_000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(Receptance(width, 8) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers(self.embed(words[:, :-1])))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), words[:, 1:].flatten())


def receptance() -> Made:
    """8 texts of 256 words."""
    return ReceptanceModel(), (torch.randint(0, 12_000, (8, 257)),)


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    query, key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, bias).transpose(1, 2).flatten(2)


class Registers(nn.Module):
    """A vision transformer whose tokens are joined by a few that stand for no patch, with gated feed-forward
    layers and scales of what is added."""

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 5, registers: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.places = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.extra = nn.Parameter(torch.randn(1, 1 + registers, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2 * depth + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.wide = nn.ModuleList(nn.Linear(width, 2 * 1024) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(1024, width) for _ in range(depth))
        self.scales = nn.ParameterList(torch.full((width,), 1e-5) for _ in range(2 * depth))
        self.head = nn.Linear(2 * width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1)
        for i, (qkv, out, wide, narrow) in enumerate(
            zip(self.qkv, self.out, self.wide, self.narrow, strict=True)
        ):
            parts = qkv(self.norms[2 * i](x)).chunk(3, -1)
            x = x + self.scales[2 * i] * out(attended(*parts, self.heads))
            gate, up = wide(self.norms[2 * i + 1](x)).chunk(2, -1)
            x = x + self.scales[2 * i + 1] * narrow(F.silu(gate) * up)
        x = self.norms[-1](x)
        seen = torch.cat([x[:, 0], x[:, self.extra.shape[1] :].mean(1)], 1)
        return F.cross_entropy(self.head(seen).float(), labels, label_smoothing=0.1)


def registers() -> Made:
    """32 images of 224 x 224."""
    return Registers(), (torch.rand(32, 3, 224, 224), torch.randint(0, 1000, (32,)))


class Columns(nn.Module):
    """Rows of a table: categories look at each other, numbers join them at the end (TabTransformer)."""

    def __init__(self, columns: int = 16, numbers: int = 12, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.shared = nn.Embedding(columns * 50, width - 4), nn.Embedding(columns, 4)
        self.register_buffer("first", 50 * torch.arange(columns))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, F.gelu, batch_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(numbers)
        self.net = layers(columns * width + numbers, 512, 256, 1)

    def forward(self, kinds: torch.Tensor, numbers: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shared = self.shared.weight.expand(len(kinds), -1, -1)
        x = torch.cat([self.embed(kinds + self.first), shared], 2)
        for layer in self.layers:
            x = layer(x)
        said = self.net(torch.cat([x.flatten(1), self.norm(numbers)], 1))[:, 0]
        return F.binary_cross_entropy_with_logits(said.float(), labels)


def columns() -> Made:
    """Batch 2048 of 16 categories and 12 numbers."""
    return Columns(), (torch.randint(0, 50, (2048, 16)), torch.randn(2048, 12), torch.rand(2048).round())


class SoftExperts(nn.Module):
    """Images by a transformer in whose feed-forward layers experts work on means over all tokens, and tokens
    take means over what they made (soft mixtures of experts)."""

    def __init__(self, width: int = 256, depth: int = 4, experts: int = 8, slots: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.places = nn.Parameter(torch.randn(1, 144, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.slots = nn.ParameterList(torch.randn(width, experts, slots) * width**-0.5 for _ in range(depth))
        self.scales = nn.ParameterList(torch.ones(()) for _ in range(depth))
        self.wide = nn.ParameterList(
            torch.randn(experts, width, 2 * width) * width**-0.5 for _ in range(depth)
        )
        self.narrow = nn.ParameterList(
            torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5 for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)

    def experts(self, x: torch.Tensor, i: int) -> torch.Tensor:
        slots = F.normalize(self.slots[i].flatten(1), dim=0) * self.scales[i]
        scores = (F.normalize(x.float(), dim=-1) @ slots).float()
        sent = (scores.softmax(1).mT @ x).unflatten(1, self.slots[i].shape[1:]).transpose(0, 1)
        made = torch.bmm(F.gelu(torch.bmm(sent.flatten(1, 2), self.wide[i])), self.narrow[i])
        made = made.unflatten(1, sent.shape[1:3]).transpose(0, 1).flatten(1, 2)
        return scores.softmax(2) @ made

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            x = x + out(attended(*qkv(self.norms[2 * i](x)).chunk(3, -1), 4))
            x = x + self.experts(self.norms[2 * i + 1](x), i)
        return F.cross_entropy(self.head(self.norms[-1](x).mean(1)).float(), labels)


def soft_experts() -> Made:
    """64 images of 96 x 96."""
    return SoftExperts(), (torch.rand(64, 3, 96, 96), torch.randint(0, 100, (64,)))


class Queries(nn.Module):
    """A detector whose queries look at each other and at an image's features, layer by layer (DETR), each
    with the object it is for."""

    def __init__(self, width: int = 256, depth: int = 3, queries: int = 100, classes: int = 91) -> None:
        super().__init__()
        sizes = (3, 32, 64, 128, 256, width)
        self.see = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(sizes)
            )
        )
        self.places = nn.Parameter(torch.randn(1, 100, width) * 0.02)
        self.asked = nn.Parameter(torch.randn(1, queries, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 8, 4 * width, 0.1, batch_first=True) for _ in range(depth)
        )
        self.classes = nn.Linear(width, classes + 1)
        self.boxes = layers(width, width, width, 4)

    def forward(self, images: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        seen = self.see(images).flatten(2).transpose(1, 2) + self.places
        x, lost = self.asked.expand(len(images), -1, -1), images.new_zeros(())
        there = (classes < self.classes.out_features - 1).float()[..., None]
        for layer in self.layers:
            x = layer(x, seen)
            lost = lost + F.cross_entropy(self.classes(x).flatten(0, 1).float(), classes.flatten())
            off = (self.boxes(x).sigmoid().float() - boxes).abs() * there
            lost = lost + 5 * off.sum() / there.sum().clamp(min=1)
        return lost


def queries() -> Made:
    """16 images of 320 x 320."""
    return Queries(), (
        *(torch.rand(16, 3, 320, 320), torch.randint(0, 92, (16, 100))),
        torch.rand(16, 100, 4),
    )


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with group norms."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()),
    )


class Gates(nn.Module):
    """A U-Net that lets through of what it skips what the deeper map asks for (Attention U-Net)."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(twice(a, b) for a, b in pairwise((1, *widths)))
        pairs = [*pairwise(reversed(widths))]
        self.grow = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.asks = nn.ModuleList(nn.Conv2d(b, b // 2, 1) for _, b in pairs)
        self.has = nn.ModuleList(nn.Conv2d(b, b // 2, 1) for _, b in pairs)
        self.lets = nn.ModuleList(nn.Conv2d(b // 2, 1, 1) for _, b in pairs)
        self.up = nn.ModuleList(twice(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, scans: torch.Tensor, organs: torch.Tensor) -> torch.Tensor:
        kept, x = [], scans
        for down in self.down:
            x = down(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for grow, asks, has, lets, up in zip(self.grow, self.asks, self.has, self.lets, self.up, strict=True):
            x, skipped = grow(F.interpolate(x, scale_factor=2.0, mode="nearest")), kept.pop()
            let = lets((asks(x) + has(skipped)).relu()).sigmoid()
            x = up(torch.cat([x, skipped * let], 1))
        said = self.head(x).float()
        chance = said.softmax(1)[:, 1]
        both = (chance * organs).sum((1, 2))
        overlap = (2 * both + 1) / (chance.sum((1, 2)) + organs.sum((1, 2)) + 1)
        return F.cross_entropy(said, organs) + (1 - overlap).mean()


def gates() -> Made:
    """8 scans of 192 x 192."""
    return Gates(), (torch.rand(8, 1, 192, 192), torch.randint(0, 2, (8, 192, 192)))


class Questions(nn.Module):
    """Questions about images: what was asked scales and shifts the maps of residual layers (FiLM)."""

    def __init__(self, width: int = 128, depth: int = 4, words: int = 90, answers: int = 28) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(words, 200, mode="sum")
        self.ask = nn.Sequential(layers(200, 512, 512), nn.ReLU(), nn.Linear(512, 2 * width * depth))
        sizes = (3, 64, width, width)
        self.see = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(sizes)
            )
        )
        self.enter = nn.ModuleList(nn.Conv2d(width + 2, width, 1) for _ in range(depth))
        self.conv = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, affine=False) for _ in range(depth))
        self.leave = nn.Conv2d(width, 512, 1)
        self.head = layers(512, 1024, answers)
        self.register_buffer(
            "places", torch.stack(torch.meshgrid(2 * [torch.linspace(-1, 1, 16)], indexing="ij"))
        )

    def forward(self, images: torch.Tensor, words: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        asked = self.ask(self.embed(words)).unflatten(1, (len(self.conv), 2, -1, 1, 1))
        x, places = self.see(images), self.places.expand(len(images), -1, -1, -1)
        for i, (enter, conv, norm) in enumerate(zip(self.enter, self.conv, self.norms, strict=True)):
            y = enter(torch.cat([x, places], 1)).relu()
            x = y + ((1 + asked[:, i, 0]) * norm(conv(y)) + asked[:, i, 1]).relu()
        return F.cross_entropy(self.head(self.leave(x).amax((2, 3))).float(), answers)


def questions() -> Made:
    """64 images of 128 x 128 with questions of 20 words."""
    return Questions(), (
        *(torch.rand(64, 3, 128, 128), torch.randint(0, 90, (64, 20))),
        torch.randint(0, 28, (64,)),
    )


class WindowsAndGrids(nn.Module):
    """Images by inverted residuals, attention within windows, and attention over grids across them
    (MaxViT)."""

    def __init__(self, width: int = 96, depth: int = 2, size: int = 7, heads: int = 3) -> None:
        super().__init__()
        self.size, self.heads = size, heads
        self.enter = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.BatchNorm2d(width), nn.GELU())
        self.convs = nn.ModuleList(
            nn.Sequential(
                *(
                    nn.BatchNorm2d(width),
                    nn.Conv2d(width, 4 * width, 1, bias=False),
                    nn.BatchNorm2d(4 * width),
                ),
                *(nn.GELU(), nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width, bias=False)),
                *(nn.BatchNorm2d(4 * width), nn.GELU(), nn.Conv2d(4 * width, width, 1)),
            )
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4 * depth))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2 * depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * depth))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2 * depth)
        )
        self.biases = nn.ParameterList(torch.zeros(1, heads, size**2, size**2) for _ in range(2 * depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1000))

    def look(self, x: torch.Tensor, i: int) -> torch.Tensor:
        """Of tokens (part, place, channel)."""
        parts = self.qkv[i](self.norms[2 * i](x)).chunk(3, -1)
        x = x + self.out[i](attended(*parts, self.heads, self.biases[i].to(parts[0].dtype)))
        return x + self.feed[i](self.norms[2 * i + 1](x))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        many = x.shape[-1] // self.size
        for i, conv in enumerate(self.convs):
            x = (x + conv(x)).permute(0, 2, 3, 1)
            for grid in (False, True):
                inner, outer = (many, self.size) if grid else (self.size, many)
                parts = x.unflatten(2, (outer, inner)).unflatten(1, (outer, inner))
                order = (0, 2, 4, 1, 3, 5) if grid else (0, 1, 3, 2, 4, 5)
                tokens = parts.permute(order)
                seen = self.look(tokens.flatten(3, 4).flatten(0, 2), 2 * i + grid).view(tokens.shape)
                back = (0, 3, 1, 4, 2, 5) if grid else (0, 1, 3, 2, 4, 5)
                x = seen.permute(back).flatten(3, 4).flatten(1, 2)
            x = x.permute(0, 3, 1, 2)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


def windows_and_grids() -> Made:
    """16 images of 224 x 224."""
    return WindowsAndGrids(), (torch.rand(16, 3, 224, 224), torch.randint(0, 1000, (16,)))
