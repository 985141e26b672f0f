"""A decoder of text with rotary positions and grouped keys: bfloat16, four micro-batches a step, clipped."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

STEPS = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 500
VOCABULARY, WIDTH, LAYERS, HEADS, GROUPS, LENGTH, BATCH, PARTS = 32003, 768, 8, 12, 4, 1024, 8, 4


def turned(x, angles):
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).to(
        x.dtype
    )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * head, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2048, bias=False) for _ in range(2))
        self.down = nn.Linear(2048, WIDTH, bias=False)

    def forward(self, x, angles):
        b, t, _ = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (turned(k, angles), v))
        y = F.scaled_dot_product_attention(turned(q, angles), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        rates = 10000 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        self.register_buffer("angles", torch.outer(torch.arange(LENGTH), rates), persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


torch.manual_seed(0)
model = Writer().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
text = torch.randint(VOCABULARY, (2_000_000,))
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))
    for _part in range(PARTS):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        x = torch.stack([text[s : s + LENGTH] for s in starts]).pin_memory().cuda(non_blocking=True)
        y = torch.stack([text[s + 1 : s + LENGTH + 1] for s in starts]).pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x, y) / PARTS
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"{step} {loss.item() * PARTS:.3f}")
