"""What the pipelines and the mixtures of experts in ``two_gpus`` train, on one GPU: for plans to split."""

import torch
import torch.nn.functional as F
from torch import nn

CHOSEN = 2


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 128
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 7 * width // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """Every expert takes as many tokens."""

    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        share, chosen = self.router(flat).float().softmax(-1).topk(CHOSEN, -1)
        order = chosen.flatten().argsort(stable=True)
        rows = order.view(len(self.experts), -1) // CHOSEN
        sent = flat[rows]
        out = torch.stack([expert(sent[i]) for i, expert in enumerate(self.experts)])
        weighted = out.flatten(0, 1) * share.to(x.dtype).flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, rows.flatten(), weighted).view_as(x)


class Layer(nn.Module):
    def __init__(self, width, wide):
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.wide = Attention(width), wide

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.wide(self.second(x))


class Layers(nn.Module):
    """Two layers, of experts where there are some; they stand for all."""

    def __init__(self, width=2048, experts=0):
        super().__init__()
        wide = [Mixture(width, experts) if experts else Gated(width) for _ in range(2)]
        self.layers = nn.ModuleList(Layer(width, each) for each in wide)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()
