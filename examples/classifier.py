"""A small network trained in fp32, with the usual mistakes: tilefit fix examples/classifier.py:make_step."""

import torch
from torch import nn
from torch.nn import functional as F


def make_step():
    """One training step on 256 images."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 7, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        images, labels = torch.zeros(256, 3, 224, 224), torch.zeros(256, dtype=torch.int64)
        scores = model(images)
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
