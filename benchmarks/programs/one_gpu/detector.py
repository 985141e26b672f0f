"""A detector without anchors: a pyramid of features, focal loss in float32, bfloat16, channels last."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
CLASSES, BATCH, SIZE = 80, 16, 512


class Bottleneck(nn.Module):
    def __init__(self, before, width, stride=1):
        super().__init__()
        norm = lambda n: nn.BatchNorm2d(n)  # noqa: E731
        self.one, self.n1 = nn.Conv2d(before, width, 1, bias=False), norm(width)
        self.two, self.n2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width)
        self.three, self.n3 = nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width)
        self.side = None
        if stride != 1 or before != 4 * width:
            self.side = nn.Sequential(nn.Conv2d(before, 4 * width, 1, stride, bias=False), norm(4 * width))

    def forward(self, x):
        y = F.relu(self.n1(self.one(x)))
        y = F.relu(self.n2(self.two(y)))
        return F.relu(self.n3(self.three(y)) + (x if self.side is None else self.side(x)))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, before = [], 64
        for width, count, stride in ((64, 2, 1), (128, 2, 2), (256, 3, 2), (512, 2, 2)):
            blocks = [
                Bottleneck(before if n == 0 else 4 * width, width, stride if n == 0 else 1)
                for n in range(count)
            ]
            stages.append(nn.Sequential(*blocks))
            before = 4 * width
        self.stages = nn.ModuleList(stages)
        self.lateral = nn.ModuleList(nn.Conv2d(4 * w, 256, 1) for w in (128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(3))
        tower = lambda: nn.Sequential(  # noqa: E731
            *(
                m
                for _ in range(3)
                for m in (nn.Conv2d(256, 256, 3, padding=1), nn.GroupNorm(32, 256), nn.ReLU())
            )
        )
        self.cls, self.box = tower(), tower()
        self.to_cls, self.to_box = nn.Conv2d(256, CLASSES, 3, padding=1), nn.Conv2d(256, 4, 3, padding=1)

    def forward(self, x):
        x, found = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        levels = [f(x) for f, x in zip(self.lateral, found[1:], strict=False)]
        for n in (1, 0):
            levels[n] = levels[n] + F.interpolate(levels[n + 1], scale_factor=2, mode="nearest")
        classes, boxes = [], []
        for smooth, level in zip(self.smooth, levels, strict=False):
            level = smooth(level)
            classes.append(self.to_cls(self.cls(level)).flatten(2).transpose(1, 2))
            boxes.append(self.to_box(self.box(level)).flatten(2).transpose(1, 2))
        return torch.cat(classes, 1), torch.cat(boxes, 1)


def focal(logits, targets, alpha=0.25):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    right = p * targets + (1 - p) * (1 - targets)
    return ((alpha * targets + (1 - alpha) * (1 - targets)) * (1 - right) ** 2 * ce).sum()


net = Detector().cuda().to(memory_format=torch.channels_last)
sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
places = sum((SIZE // s) ** 2 for s in (8, 16, 32))
images = torch.randn(BATCH, 3, SIZE, SIZE).pin_memory()
labels = (torch.rand(BATCH, places, CLASSES) > 0.999).float()
boxes = torch.rand(BATCH, places, 4)
for step in range(args.steps):
    x = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
    y, z = labels.cuda(), boxes.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cls, box = net(x)
    positive = y.amax(-1, keepdim=True)
    count = positive.sum().clamp(min=1)
    loss = (
        focal(cls.float(), y) / count
        + (F.smooth_l1_loss(box.float(), z, reduction="none") * positive).sum() / count
    )
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if step % 20 == 0:
        print("step", step, "loss", float(loss))
