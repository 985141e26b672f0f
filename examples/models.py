"""Small models of kinds that no model library offers, to check: ``tilefit check examples/models.py:unet``."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class LstmLanguageModel(nn.Module):
    """A word-level language model: embedding, two LSTM layers, head (Zaremba et al., 2014, medium size)."""

    def __init__(self, vocabulary: int = 10000, hidden: int = 650, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=0.5)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss of predicting ``targets`` from ``tokens``, both int64[time, batch]."""
        output, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(output).flatten(0, 1), targets.flatten())


def lstm_lm() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """35 time steps, batch 20."""
    tokens = torch.zeros(35, 20, dtype=torch.int64)
    return LstmLanguageModel(), (tokens, tokens.clone())


class SpeechEncoder(nn.Module):
    """Convolutional front end and bidirectional GRU layers over the frames of a spectrogram."""

    def __init__(self, features: int = 161, hidden: int = 512, layers: int = 3, symbols: int = 29) -> None:
        super().__init__()
        self.front = nn.Conv1d(features, hidden, 11, stride=2, padding=5)
        self.gru = nn.GRU(hidden, hidden, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, symbols)

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """Symbol scores [batch, time / 2, symbols] of a spectrogram [batch, features, time]."""
        x = torch.relu(self.front(spectrogram)).transpose(1, 2)
        return self.head(self.gru(x)[0])


def speech() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """1000 frames, batch 16."""
    return SpeechEncoder(), (torch.zeros(16, 161, 1000),)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """A U-Net with skip connections and attention at its lowest resolution, as diffusion models use it."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(_Block(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.middle = nn.MultiheadAttention(widths[-1], 4, batch_first=True)
        self.up = nn.ModuleList(_Block(2 * w, max(channels, w // 2)) for w in reversed(widths))
        self.leave = nn.Conv2d(channels, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An image [batch, 3, height, width] of the same size."""
        x = self.enter(x)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        rows = x.flatten(2).transpose(1, 2)
        rows = rows + self.middle(rows, rows, rows, need_weights=False)[0]
        x = rows.transpose(1, 2).reshape(x.shape)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return self.leave(x)


def unet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """64 x 64 images, batch 32."""
    return UNet(), (torch.zeros(32, 3, 64, 64),)


class Recommender(nn.Module):
    """Dense features and embedded categories, their pairwise products, and a top network (as in DLRM)."""

    def __init__(self, tables: int = 26, rows: int = 10000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 479), nn.ReLU(), nn.Linear(479, 1))
        self.register_buffer("lower", torch.tensor(_pairs(tables + 1)), persistent=False)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Click scores [batch] of dense [batch, 13] and categories [batch, tables]."""
        bottom = self.bottom(dense)
        vectors = [bottom, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, dim=1)
        products = (stacked @ stacked.transpose(1, 2)).flatten(1)[:, self.lower]
        return self.top(torch.cat([bottom, products], dim=1)).squeeze(1)


def _pairs(size: int) -> list[int]:
    return [i * size + j for i in range(size) for j in range(i)]


def recommender() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Batch 4096."""
    return Recommender(), (torch.zeros(4096, 13), torch.randint(0, 10000, (4096, 26)))


def odd_cnn() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolutional network with channel counts no Tensor Core likes; batch 64 of 64 x 64 images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 60), (60, 60), (60, 90), (90, 90), (90, 150), (150, 150)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(150, 100)]
    return nn.Sequential(*layers), (torch.zeros(64, 3, 64, 64),)


class HandWrittenAttention(nn.Module):
    """Transformer blocks whose attention is written out: scores, mask, softmax, dropout, product."""

    def __init__(self, width: int = 512, heads: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] in and out, causal."""
        batch, time, width = x.shape
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).tril()
        for qkv, out, norm in zip(self.qkv, self.out, self.norm, strict=True):
            q, k, v = qkv(norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), 0.1, self.training)
            x = x + out((weights @ v).transpose(1, 2).reshape(batch, time, width))
        return x


def attention() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """1024 tokens of width 512, batch 8."""
    return HandWrittenAttention(), (torch.zeros(8, 1024, 512),)


def odd_mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Layers of 479, 1023 and 511 features, batch 8191."""
    layers = nn.Sequential(
        nn.Linear(479, 1023), nn.ReLU(), nn.Linear(1023, 511), nn.ReLU(), nn.Linear(511, 479)
    )
    return layers, (torch.zeros(8191, 479),)
