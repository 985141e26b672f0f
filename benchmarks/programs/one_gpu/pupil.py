"""A small vision transformer taught by a large one that is frozen, in bfloat16; patches cut by a convolution."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(d, eps=1e-6), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(d, eps=1e-6), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, d, heads, depth, classes=1000):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.randn(1, 197, d) * 0.02)
        self.blocks = nn.Sequential(*[Block(d, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


device = torch.device("cuda")
pupil, teacher = ViT(192, 3, 12).to(device), ViT(768, 12, 12).to(device).eval()
teacher.requires_grad_(False)
decay = [p for p in pupil.parameters() if p.ndim > 1]
plain = [p for p in pupil.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=5e-4
)
for step in range(args.steps):
    images = torch.rand(128, 3, 224, 224, device=device)
    labels = torch.randint(1000, (128,), device=device)
    share = torch.rand((), device=device)
    images = share * images + (1 - share) * images.flip(0)
    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            wanted = teacher(images)
        made = pupil(images)
        loss = share * F.cross_entropy(made, labels) + (1 - share) * F.cross_entropy(made, labels.flip(0))
        loss = 0.5 * loss + 0.5 * F.kl_div(
            F.log_softmax(made / 2, -1), F.log_softmax(wanted / 2, -1), log_target=True, reduction="batchmean"
        )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: {loss.item():.4f}")
