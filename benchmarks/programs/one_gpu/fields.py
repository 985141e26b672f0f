"""A neural field: rays, samples along them, sines of positions, a small network, colours added up."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--rays", type=int, default=4096)
parser.add_argument("--samples", type=int, default=64)
args = parser.parse_args()


def encoded(x, octaves):
    angles = x[..., None, :] * 2.0 ** torch.arange(octaves, device=x.device)[:, None] * torch.pi
    return torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)


class Field(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.lower = nn.ModuleList([nn.Linear(63, width), *(nn.Linear(width, width) for _ in range(3))])
        self.upper = nn.ModuleList(
            [nn.Linear(width + 63, width), *(nn.Linear(width, width) for _ in range(3))]
        )
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.colour = nn.Sequential(nn.Linear(width + 27, width // 2), nn.ReLU(), nn.Linear(width // 2, 3))

    def forward(self, points, directions):
        at = encoded(points, 10)
        x = at
        for layer in self.lower:
            x = torch.relu(layer(x))
        x = torch.cat([x, at], -1)
        for layer in self.upper:
            x = torch.relu(layer(x))
        seen = encoded(directions, 4)[:, None].expand(-1, points.shape[1], -1)
        return torch.relu(self.density(x)), self.colour(torch.cat([self.feature(x), seen], -1)).sigmoid()


def rendered(field, origins, directions):
    depth = torch.linspace(2, 6, args.samples, device=origins.device)
    depth = depth + torch.rand(len(origins), args.samples, device=origins.device) * 4 / args.samples
    points = origins[:, None] + directions[:, None] * depth[..., None]
    density, colour = field(points, directions)
    gaps = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full_like(depth[:, :1], 1e10)], -1)
    alpha = 1 - torch.exp(-density.squeeze(-1) * gaps)
    passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    return ((alpha * passed)[..., None] * colour).sum(1)


torch.set_float32_matmul_precision("high")
coarse = Field().cuda()
optimizer = torch.optim.Adam(coarse.parameters(), lr=5e-4)
for step in range(args.steps):
    origins = torch.randn(args.rays, 3, device="cuda")
    directions = nn.functional.normalize(torch.randn(args.rays, 3, device="cuda"), dim=-1)
    wanted = torch.rand(args.rays, 3, device="cuda")
    loss = ((rendered(coarse, origins, directions) - wanted) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, -10 * torch.log10(loss).item())
