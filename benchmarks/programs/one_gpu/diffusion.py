"""Denoising diffusion: a U-Net with attention in its middle, float16 with a scaler, a moving average by hand."""

import argparse
import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=128)
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, before, after, time):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Linear(time, after)
        self.second = nn.Sequential(nn.GroupNorm(8, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, t):
        return self.skip(x) + self.second(self.first(x) + self.time(F.silu(t))[:, :, None, None])


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, width), heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT)
        return x + self.out(y.mT.reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.width, sizes = width, [width, width, 2 * width, 2 * width]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b, 4 * width) for a, b in itertools.pairwise(sizes))
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, 2, 1) for b in sizes[1:])
        self.middle = nn.ModuleList([Residual(sizes[-1], sizes[-1], 4 * width), Attention(sizes[-1])])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, b, 4, 2, 1) for b in reversed(sizes[1:]))
        self.up = nn.ModuleList(
            Residual(2 * b, a, 4 * width)
            for a, b in zip(reversed(sizes[:-1]), reversed(sizes[1:]), strict=False)
        )
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x, t):
        rates = torch.exp(-torch.arange(self.width // 2, device=x.device) * 9.2 / (self.width // 2))
        angle = t[:, None].float() * rates[None]
        t = self.embed(torch.cat([angle.sin(), angle.cos()], -1))
        x, kept = self.first(x), []
        for block, shrink in zip(self.down, self.shrink, strict=False):
            x = block(x, t)
            kept.append(x)
            x = shrink(x)
        x = self.middle[1](self.middle[0](x, t))
        for grow, block in zip(self.grow, self.up, strict=False):
            x = block(torch.cat([grow(x), kept.pop()], 1), t)
        return self.last(x)


device = torch.device("cuda")
model = UNet(args.width).to(device)
average = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
scaler = torch.amp.GradScaler("cuda")
betas = torch.linspace(1e-4, 0.02, 1000, device=device)
kept = (1 - betas).cumprod(0)
for step in range(args.steps):
    x = torch.rand(args.batch, 3, 64, 64, device=device) * 2 - 1
    t = torch.randint(0, 1000, (args.batch,), device=device)
    noise = torch.randn_like(x)
    share = kept[t][:, None, None, None]
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), model.parameters(), strict=False):
            ours.mul_(0.999).add_(theirs, alpha=0.001)
    if step % 100 == 0:
        print(step, loss.item())
