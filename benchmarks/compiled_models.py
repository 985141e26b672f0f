"""Models of further kinds whose compiled steps are measured: what a compiler fuses least.

Gather and scatter, interpolation, losses over images and over several scales, attention with relative
positions, convolutions over a sequence. Each function returns a model and its inputs; most models return
their loss. Indices are random: on equal ones every addition into a table would wait for the one before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]


class Graph(nn.Module):
    """Message passing: both ends of each edge are gathered, a network makes a message, nodes sum theirs."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(64, width)
        self.message = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(layers)
        )
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.leave = nn.Linear(width, 16)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source, target = edges
        x = self.enter(nodes)
        for message, update, norm in zip(self.message, self.update, self.norm, strict=True):
            sent = message(torch.cat([x[source], x[target]], dim=1))
            received = torch.zeros_like(x, dtype=sent.dtype).index_add(0, target, sent)
            x = norm(x + update(torch.cat([x, received.to(x.dtype)], dim=1)))
        return F.cross_entropy(self.leave(x), labels)


def graph() -> Made:
    """50,000 nodes, 400,000 edges."""
    edges = torch.randint(0, 50_000, (2, 400_000))
    return Graph(), (torch.randn(50_000, 64), edges, torch.randint(0, 16, (50_000,)))


class PointCloud(nn.Module):
    """Edge convolutions over each point's nearest neighbours (as in DGCNN)."""

    def __init__(self, neighbours: int = 20) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
            for a, b in pairwise((3, 64, 64, 128))
        )
        self.leave = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 40))

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = points
        found = []
        for conv in self.convs:
            near = torch.cdist(x.float(), x.float()).topk(self.neighbours, largest=False).indices
            batch, count, width = x.shape
            index = near.flatten(1)[..., None].expand(-1, -1, width)
            around = x.gather(1, index).view(batch, count, self.neighbours, width)
            centre = x[:, :, None].expand_as(around)
            edges = torch.cat([centre, around - centre], dim=-1).permute(0, 3, 1, 2)
            x = conv(edges).amax(-1).transpose(1, 2)
            found.append(x)
        return F.cross_entropy(self.leave(torch.cat(found, dim=-1).amax(1)), labels)


def points() -> Made:
    """32 clouds of 1024 points."""
    return PointCloud(), (torch.randn(32, 1024, 3), torch.randint(0, 40, (32,)))


def _norm_relu(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Segmenter(nn.Module):
    """A U-Net that goes up by bilinear interpolation, trained on labels of pixels."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 21) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(_norm_relu(a, b), _norm_relu(b, b)) for a, b in pairwise((3, *widths))
        )
        self.up = nn.ModuleList(
            nn.Sequential(_norm_relu(a + b, b), _norm_relu(b, b)) for b, a in reversed([*pairwise(widths)])
        )
        self.leave = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, skips = images, []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skip], dim=1))
        scores = F.interpolate(self.leave(x), scale_factor=2.0, mode="bilinear", align_corners=False)
        return F.cross_entropy(scores, labels)


def segmenter() -> Made:
    """16 images of 256 x 256, labelled at twice that."""
    return Segmenter(), (torch.randn(16, 3, 256, 256), torch.randint(0, 21, (16, 512, 512)))


class ClickRate(nn.Module):
    """Factorisation machine and network over one large table of all categories (as in DeepFM)."""

    def __init__(self, rows: int = 1_000_000, width: int = 32, fields: int = 26) -> None:
        super().__init__()
        self.vectors = nn.Embedding(rows, width)
        self.weights = nn.Embedding(rows, 1)
        self.network = nn.Sequential(
            nn.Linear(fields * width, 400),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(400, 1),
        )

    def forward(self, categories: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        vectors = self.vectors(categories)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        scores = self.weights(categories).sum((1, 2)) + pairs + self.network(vectors.flatten(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, clicked)


def click_rate() -> Made:
    """Batch 8192 of 26 categories."""
    return ClickRate(), (torch.randint(0, 1_000_000, (8192, 26)), torch.rand(8192))


class Autoencoder(nn.Module):
    """A variational autoencoder of images: likelihood of every pixel and the divergence of the code."""

    def __init__(self, width: int = 64, code: int = 128) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.encoder = nn.Sequential(*(_norm_relu(a, b, stride=2) for a, b in pairwise(widths)))
        self.code = nn.Conv2d(4 * width, 2 * code, 1)
        layers: list[nn.Module] = [nn.Conv2d(code, 4 * width, 1)]
        for a, b in pairwise((4 * width, 2 * width, width, width)):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.SiLU()]
        self.decoder = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.code(self.encoder(images)).float().chunk(2, dim=1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        seen = F.binary_cross_entropy_with_logits(self.decoder(sample).float(), images, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (seen + divergence) / images.shape[0]


def autoencoder() -> Made:
    """64 images of 128 x 128."""
    return Autoencoder(), (torch.rand(64, 3, 128, 128),)


def mlp() -> Made:
    """Layers of 2048 with batch norm and dropout, batch 8192."""
    layers: list[nn.Module] = []
    for a, b in pairwise((512, 2048, 2048, 2048, 2048)):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(2048, 1000)), (torch.randn(8192, 512),)


class Detector(nn.Module):
    """A feature pyramid and a dense head; focal loss and smooth L1 at every level (as in RetinaNet)."""

    def __init__(self, classes: int = 80, anchors: int = 9, width: int = 128) -> None:
        super().__init__()
        self.classes = classes
        self.enter = nn.Sequential(_norm_relu(3, 32, 2), _norm_relu(32, 64, 2))
        self.levels = nn.ModuleList(
            nn.Sequential(_norm_relu(a, b, 2), _norm_relu(b, b)) for a, b in pairwise((64, 128, 256, 512))
        )
        self.sides = nn.ModuleList(nn.Conv2d(c, width, 1) for c in (128, 256, 512))
        self.score = nn.Sequential(
            _norm_relu(width, width), nn.Conv2d(width, anchors * classes, 3, padding=1)
        )
        self.box = nn.Sequential(_norm_relu(width, width), nn.Conv2d(width, anchors * 4, 3, padding=1))

    def forward(self, images: torch.Tensor, labels: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        features = []
        for level, side in zip(self.levels, self.sides, strict=True):
            x = level(x)
            features.append(side(x))
        for i in (1, 0):
            features[i] = features[i] + F.interpolate(features[i + 1], scale_factor=2.0)
        total = images.new_zeros(())
        start = 0
        for feature in features:
            scores = self.score(feature).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, self.classes))
            found = self.box(feature).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4))
            end = start + scores.shape[1]
            wanted = F.one_hot(labels[:, start:end], self.classes + 1)[..., 1:].float()
            cross = F.binary_cross_entropy_with_logits(scores.float(), wanted, reduction="none")
            p = scores.float().sigmoid()
            right = p * wanted + (1 - p) * (1 - wanted)
            total = total + (cross * (1 - right).square()).sum() / wanted.sum().clamp(min=1)
            there = (labels[:, start:end] > 0)[..., None]
            off = F.smooth_l1_loss(found.float(), boxes[:, start:end], reduction="none")
            total = total + (off * there).sum() / there.sum().clamp(min=1)
            start = end
        return total


def detector() -> Made:
    """8 images of 512 x 512."""
    anchors = 9 * (64**2 + 32**2 + 16**2)
    labels = (torch.randint(0, 81, (8, anchors)) * (torch.rand(8, anchors) < 0.01)).long()
    return Detector(), (torch.randn(8, 3, 512, 512), labels, torch.randn(8, anchors, 4))


class Resolution(nn.Module):
    """Super-resolution: residual blocks, pixel shuffle, mean absolute error of the image (as in EDSR)."""

    def __init__(self, width: int = 64, blocks: int = 8, scale: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(blocks)
        )
        self.up = nn.Sequential(nn.Conv2d(width, width * scale**2, 3, padding=1), nn.PixelShuffle(scale))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        x = first = self.enter(small)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return F.l1_loss(self.leave(self.up(x + first)), large)


def resolution() -> Made:
    """16 patches of 96 x 96 to 384 x 384."""
    return Resolution(), (torch.rand(16, 3, 96, 96), torch.rand(16, 3, 384, 384))


class Wave(nn.Module):
    """Dilated causal convolutions over samples with gated units (as in WaveNet)."""

    def __init__(self, width: int = 128, layers: int = 10, symbols: int = 256) -> None:
        super().__init__()
        self.enter = nn.Embedding(symbols, width)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers))
        self.out = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.leave = nn.Conv1d(width, symbols, 1)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        x = self.enter(samples).transpose(1, 2)
        total = torch.zeros_like(x)
        for i, (gate, out) in enumerate(zip(self.gates, self.out, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            y = out(a.tanh() * b.sigmoid())
            x, total = x + y, total + y
        return F.cross_entropy(self.leave(total.relu())[..., :-1], samples[:, 1:])


def wave() -> Made:
    """8 stretches of 8192 samples."""
    return Wave(), (torch.randint(0, 256, (8, 8192)),)


class Registration(nn.Module):
    """Image registration: a network moves an image by a field, which ``grid_sample`` applies."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.field = nn.Sequential(
            _norm_relu(2, width), _norm_relu(width, width, 2), nn.Conv2d(width, 2, 3, padding=1)
        )

    def forward(self, moving: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        field = self.field(torch.cat([moving, fixed], dim=1)).float()
        field = F.interpolate(field, scale_factor=2.0, mode="bilinear", align_corners=False)
        steps = torch.linspace(-1, 1, moving.shape[-1], device=moving.device)
        still = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1)
        moved = F.grid_sample(moving, still + field.permute(0, 2, 3, 1), align_corners=False)
        smooth = field.diff(dim=2).square().mean() + field.diff(dim=3).square().mean()
        return F.mse_loss(moved, fixed) + 0.01 * smooth


def registration() -> Made:
    """32 pairs of images of 256 x 256."""
    return Registration(), (torch.rand(32, 1, 256, 256), torch.rand(32, 1, 256, 256))


def encoder() -> Made:
    """``nn.TransformerEncoder``, 512 wide, 6 layers; 32 sequences of 256."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 6), (torch.randn(32, 256, 512),)


def odd_encoder() -> Made:
    """``nn.TransformerEncoder``, 500 wide, 10 heads, 6 layers; 30 sequences of 333: the host is the limit."""
    layer = nn.TransformerEncoderLayer(500, 10, 2000, batch_first=True)
    return nn.TransformerEncoder(layer, 6), (torch.randn(30, 333, 500),)


class Translator(nn.Module):
    """``nn.Transformer`` between embeddings; targets are masked causally, sources by their lengths."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(vocabulary, width) for _ in range(2))
        self.body = nn.Transformer(width, heads, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        pads = source == 0
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, device=target.device)
        y = self.body(
            self.source(source), self.target(target[:, :-1]), tgt_mask=causal, src_key_padding_mask=pads,
            memory_key_padding_mask=pads, tgt_is_causal=True,
        )  # fmt: skip
        return F.cross_entropy(self.head(y).flatten(0, 1), target[:, 1:].flatten())


def translator() -> Made:
    """300 wide, 6 heads, 4 and 4 layers; 64 pairs of sentences of 128 of 8000 words."""
    return Translator(300, 6, 4, 8000), tuple(torch.randint(1, 8000, (64, 128)) for _ in range(2))


class NextWord(nn.Module):
    """A language model of ``nn.TransformerEncoder``, as in PyTorch's example of one."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        layer = nn.TransformerEncoderLayer(width, heads, width)
        self.body = nn.TransformerEncoder(layer, layers)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(len(words) - 1, device=words.device)
        y = self.body(self.embedding(words[:-1]), mask=causal)
        return F.cross_entropy(self.head(y).flatten(0, 1), words[1:].flatten())


def next_word() -> Made:
    """650 wide, 5 heads, 4 layers; 64 texts of 257 of 33278 words, time first."""
    return NextWord(650, 5, 4, 33278), (torch.randint(0, 33278, (257, 64)),)


class Words(nn.Module):
    """A language model of two LSTM layers with the embedding as its head."""

    def __init__(self, vocabulary: int = 10000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.2)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embedding(tokens[:, :-1]))
        scores = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def words() -> Made:
    """64 sequences of 129 random words."""
    return Words(), (torch.randint(0, 10000, (64, 129)),)


def deberta(layers: int = 8) -> Made:
    """DeBERTa v3's base with its relative positions; 16 sequences of 384."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=32000,
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=3072,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        type_vocab_size=0,
    )
    tokens = torch.randint(0, 32000, (16, 384))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    return DebertaV2ForMaskedLM(config), inputs


def segformer() -> Made:
    """SegFormer-B0 with its head for pixels; 8 images of 512 x 512."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    inputs = {
        "pixel_values": torch.randn(8, 3, 512, 512),
        "labels": torch.randint(0, 150, (8, 512, 512)),
    }
    return SegformerForSemanticSegmentation(SegformerConfig(num_labels=150)), inputs
