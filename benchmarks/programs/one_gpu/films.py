"""Short films: convolutions over time and place, float16 by autocast with a scaler, Nesterov's momentum."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()


def factored(a, b, stride=1):
    return nn.Sequential(
        nn.Conv3d(a, b, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False), nn.BatchNorm3d(b), nn.ReLU(True),
        nn.Conv3d(b, b, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False), nn.BatchNorm3d(b),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.first, self.second = factored(a, b, stride), factored(b, b)
        self.side = nn.Conv3d(a, b, 1, stride, bias=False) if stride > 1 or a != b else nn.Identity()
        self.relu = nn.ReLU(True)

    def forward(self, x):
        return self.relu(self.second(self.relu(self.first(x))) + self.side(x))


model = nn.Sequential(
    nn.Conv3d(3, 64, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(64), nn.ReLU(True),
    Block(64, 64, 1), Block(64, 128, 2), Block(128, 256, 2), Block(256, 512, 2),
    nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 400),
).to("cuda")  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
loss_of = nn.CrossEntropyLoss()
for step in range(args.steps):
    clips = torch.randn(8, 3, 16, 112, 112).to("cuda", non_blocking=True)
    labels = torch.randint(0, 400, (8,)).to("cuda", non_blocking=True)
    with torch.amp.autocast("cuda"):
        loss = loss_of(model(clips), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(step, loss.item())
