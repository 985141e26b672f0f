"""Low-rank adapters beside the frozen bfloat16 weights of a decoder, recomputing each layer's activations."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--rank", type=int, default=16)
args = parser.parse_args()
WIDTH, HIDDEN, HEADS, VOCABULARY, BATCH, LENGTH = 2048, 5632, 16, 32000, 4, 1024


class Adapted(nn.Module):
    def __init__(self, base, rank, alpha=32):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        low = F.linear(F.linear(self.drop(x).to(self.a.dtype), self.a), self.b)
        return self.base(x) + self.scale * low.to(x.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.o(y)
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


model = Decoder().to("cuda", torch.bfloat16).requires_grad_(False)
for layer in model.layers:
    for name in ("q", "v"):
        setattr(layer, name, Adapted(getattr(layer, name), args.rank).to("cuda"))
trained = [p for p in model.parameters() if p.requires_grad]
for p in trained:
    p.data = p.data.float()
print(sum(p.numel() for p in trained), "of", sum(p.numel() for p in model.parameters()))
optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
for step in range(args.steps):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
