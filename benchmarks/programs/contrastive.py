"""Momentum contrast: a ResNet against a slowly following copy of it, with a queue of negative samples."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18


class Contrast(nn.Module):
    def __init__(self, width=128, queue=4096, temperature=0.2):
        super().__init__()
        self.encoder = resnet18(num_classes=width)
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)
        self.temperature = temperature
        self.register_buffer("queue", F.normalize(torch.randn(width, queue), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, images, momentum=0.99):
        for ours, theirs in zip(self.encoder.parameters(), self.follower.parameters(), strict=True):
            theirs.mul_(momentum).add_(ours, alpha=1 - momentum)
        order = torch.randperm(len(images), device=images.device)
        keys = F.normalize(self.follower(images[order]), dim=1)
        return keys[order.argsort()]

    @torch.no_grad()
    def enqueue(self, keys):
        at = int(self.place)
        self.queue[:, at : at + len(keys)] = keys.T
        self.place[0] = (at + len(keys)) % self.queue.shape[1]

    def forward(self, one, other):
        queries = F.normalize(self.encoder(one), dim=1)
        keys = self.keys(other)
        positive = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        negative = queries @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], 1) / self.temperature
        self.enqueue(keys)
        return F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long, device=one.device))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Contrast().to(device)
optimizer = torch.optim.SGD(model.encoder.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
for step in range(200):
    one, other = torch.randn(2, 64, 3, 96, 96).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(one, other)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 50 == 0:
        print(step, loss.item())
