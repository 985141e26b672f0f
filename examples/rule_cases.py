"""A small case of every rule of ``tilefit rules``: what its page in ``docs/rules`` shows.

A function has the name of its rule, and says with which options the rule is to see it:

    tilefit check examples/rule_cases.py:aln001 --gpu h200 --amp bf16 --select ALN001
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_Case = TypeVar("_Case", bound=Callable[..., object])

#: The options of each case, by name.
OPTIONS: dict[str, str] = {}


def case(options: str) -> Callable[[_Case], _Case]:
    """Mark a case, with options of ``tilefit check``."""

    def mark(build: _Case) -> _Case:
        OPTIONS[build.__name__] = options
        return build

    return mark


# ---- alignment -----------------------------------------------------------------------------------


@case("--amp bf16")
def aln001():
    layers = nn.Linear(2048, 5461), nn.SiLU(), nn.Linear(5461, 2048)
    return nn.Sequential(*layers), torch.empty(16384, 2048)


@case("--amp bf16")
def aln002():
    class LanguageModel(nn.Module):
        def __init__(self, vocabulary=50257, features=768):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, features)
            self.head = nn.Linear(features, vocabulary, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            logits = self.head(self.embedding(tokens))
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return LanguageModel(), torch.zeros(16, 1024, dtype=torch.long)


@case("--amp bf16")
def aln003():
    class MixPositions(nn.Module):
        def __init__(self, positions=1536):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(positions, positions))

        def forward(self, x):
            return self.weight @ x

    return MixPositions(), torch.empty(1536, 16383, requires_grad=True)


@case("--amp bf16 --channels-last")
def aln004():
    layers = nn.Conv2d(64, 60, 3, padding=1), nn.ReLU(), nn.Conv2d(60, 60, 3, padding=1)
    return nn.Sequential(*layers), torch.empty(256, 64, 56, 56)


@case("--amp bf16 --channels-last --infer")
def aln005():
    return nn.Conv2d(3, 64, 3, stride=2, padding=1), torch.empty(256, 3, 224, 224)


class SelfAttention(nn.Module):
    """Attention over ``heads``, as one kernel or written out."""

    def __init__(self, width: int, heads: int, *, by_hand: bool = False) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            y = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(-2))


@case("--amp bf16")
def aln006():
    return SelfAttention(768, heads=12, by_hand=True), torch.empty(64, 577, 768)


@case("--amp bf16")
def aln007():
    return nn.LSTM(1501, 1501), torch.empty(100, 256, 1501)


# ---- quantization --------------------------------------------------------------------------------


@case("--amp bf16 --gpu a100-sxm-80gb")
def qnt001():
    layers = (nn.Linear(4096, 1032, bias=False), nn.Linear(1032, 4096, bias=False)) * 4
    return nn.Sequential(*layers), torch.empty(3456, 4096)


@case("--amp bf16 --gpu a100-sxm-80gb")
def qnt002():
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(4)]
    return nn.Sequential(*layers), torch.empty(21, 512, 2048)


@case("--amp bf16")
def qnt003():
    layers = (nn.Linear(8192, 72, bias=False), nn.Linear(72, 8192, bias=False)) * 4
    return nn.Sequential(*layers), torch.empty(65536, 8192)


# ---- batch ---------------------------------------------------------------------------------------


@case("--amp bf16")
def bat001():
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), torch.empty(16, 4096)


@case("--amp bf16 --gpu l4")
def bat002():
    layers = [nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) for _ in range(4)]
    return nn.Sequential(*layers), torch.empty(64, 1024, 4096)


# ---- intensity -----------------------------------------------------------------------------------


@case("--infer")
def int001():
    layers = [nn.Linear(8192, 8192) for _ in range(8)]
    return nn.Sequential(*layers).bfloat16(), torch.empty(1, 8192, dtype=torch.bfloat16)


@case("--amp bf16 --channels-last")
def int002():
    def normalised(layer):
        return layer, nn.BatchNorm2d(96), nn.ReLU()

    return nn.Sequential(
        nn.Conv2d(16, 16, 1),
        *normalised(nn.Conv2d(16, 96, 1, bias=False)),
        *normalised(nn.Conv2d(96, 96, 3, stride=2, padding=1, groups=96, bias=False)),
        nn.Conv2d(96, 16, 1, bias=False),
    ), torch.empty(128, 16, 112, 112)


@case("--infer")
def int003():
    class Adapted(nn.Module):
        def __init__(self, features=2048, rank=16):
            super().__init__()
            self.full = nn.Linear(features, features, bias=False)
            self.down = nn.Linear(features, rank, bias=False)
            self.up = nn.Linear(rank, features, bias=False)

        def forward(self, x):
            return self.full(x) + 2.0 * self.up(self.down(x))

    return Adapted().bfloat16(), torch.empty(8192, 2048, dtype=torch.bfloat16)


@case("--amp bf16")
def int004():
    class GatedMlp(nn.Module):
        def __init__(self, features=1024, hidden=2816):
            super().__init__()
            self.gate = nn.Linear(features, hidden, bias=False)
            self.up = nn.Linear(features, hidden, bias=False)
            self.down = nn.Linear(hidden, features, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    return nn.Sequential(GatedMlp(), GatedMlp()), torch.empty(4096, 1024)


@case("--amp bf16 --fused-optimizer")
def int005():
    class PerPosition(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1024, 2048)

        def forward(self, x):
            return torch.stack([self.layer(row) for row in x])

    return PerPosition(), torch.empty(64, 16, 1024)


# ---- layout --------------------------------------------------------------------------------------


@case("--amp bf16")
def lay001():
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]
    return nn.Sequential(*layers), torch.empty(256, 64, 56, 56)


@case("--amp bf16")
def lay002():
    class Block(nn.Module):
        def __init__(self, channels=384):
            super().__init__()
            self.norm = nn.LayerNorm(channels)
            self.fc = nn.Linear(channels, channels)

        def forward(self, x):
            y = self.fc(self.norm(x.permute(0, 2, 3, 1).contiguous()))
            return x + y.permute(0, 3, 1, 2).contiguous()

    return nn.Sequential(Block(), Block()), torch.empty(128, 384, 56, 56)


@case("--infer")
def lay003():
    return nn.Linear(4096, 4089).bfloat16(), torch.empty(4096, 4096, dtype=torch.bfloat16)


# ---- outside the Tensor Cores --------------------------------------------------------------------


class RmsNorm(nn.Module):
    """A normalisation written out in fp32."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@case("--amp bf16")
def ntc001():
    layers = [nn.Sequential(nn.Linear(1024, 1024), RmsNorm(1024), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.empty(16384, 1024)


@case("--amp bf16")
def ntc002():
    return SelfAttention(1024, heads=16, by_hand=True), torch.empty(8, 1024, 1024)


@case("--amp bf16")
def ntc003():
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), torch.empty(1024, 4096)


@case("--amp bf16")
def ntc004():
    class Head(nn.Module):
        def __init__(self, features=1024, vocabulary=64000):
            super().__init__()
            self.head = nn.Linear(features, vocabulary, bias=False)

        def forward(self, x, targets):
            return F.cross_entropy(self.head(x), targets)

    return Head(), (torch.empty(8192, 1024), torch.zeros(8192, dtype=torch.long))


@case("--amp bf16")
def ntc005():
    class NothingMasked(nn.Module):
        def __init__(self, width=1024, heads=16):
            super().__init__()
            self.heads = heads
            self.qkv = nn.Linear(width, 3 * width)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            length = x.shape[1]
            mask = torch.ones(length, 1, dtype=torch.bool, device=x.device).expand(length, length)
            return F.scaled_dot_product_attention(q, k, v, mask)

    return NothingMasked(), torch.empty(8, 1024, 1024)


# ---- several GPUs --------------------------------------------------------------------------------


@case("--amp bf16 --tensor-parallel 2")
def par001():
    class Block(nn.Module):
        def __init__(self, width=1600):
            super().__init__()
            self.attention = SelfAttention(width, heads=25)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            x = x + self.attention(x)
            return x + self.down(F.gelu(self.up(x)))

    return Block(), torch.empty(8, 1024, 1600)


# ---- precision -----------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


@case("")
def prc001():
    return _mlp(), torch.empty(8192, 1024)


@case("")
def prc002():
    return _mlp(), torch.empty(8192, 1024)


@case("--gpu l40s")
def prc003():
    return _mlp().double(), torch.empty(8192, 1024, dtype=torch.float64)


@case("--infer")
def prc004():
    layers = [nn.Sequential(RmsNorm(2048), nn.Linear(2048, 2048)) for _ in range(3)]
    return nn.Sequential(*layers).bfloat16(), torch.empty(16384, 2048, dtype=torch.bfloat16)


@case("--amp bf16 --infer")
def prc005():
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), torch.empty(64, 4096)


# ---- recurrent layers ----------------------------------------------------------------------------


@case("--amp fp16")
def rnn001():
    return nn.LSTM(1024, 1024), torch.empty(256, 12, 1024)


@case("--amp bf16")
def rnn003():
    return nn.LSTM(1024, 1024, num_layers=2), torch.empty(256, 8, 1024)


@case("")
def rnn002():
    class Loop(nn.Module):
        def __init__(self, features=256):
            super().__init__()
            self.cell = nn.LSTMCell(features, features)

        def forward(self, x):
            state = x.new_zeros(2, *x.shape[1:]).unbind()
            outputs = []
            for step in x:
                state = self.cell(step, state)
                outputs.append(state[0])
            return torch.stack(outputs)

    return Loop(), torch.empty(64, 16, 256)
