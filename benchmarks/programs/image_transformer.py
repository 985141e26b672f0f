"""A vision transformer and a convolutional network teach each other, in half precision."""

import torch
import torch.nn.functional as F
from torch import nn


class Transformer(nn.Module):
    def __init__(self, size=128, patch=16, width=384, depth=6, classes=100):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(self.patches(x).flatten(2).mT + self.places).mean(1))


def convolutions(classes=100):
    layers, width = [], 3
    for wider in (64, 128, 256, 512):
        layers += [nn.Conv2d(width, wider, 3, 2, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU(True)]
        layers += [nn.Conv2d(wider, wider, 3, 1, 1, groups=wider // 32, bias=False), nn.BatchNorm2d(wider)]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
student = Transformer().to(device)
teacher = convolutions().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW([*student.parameters(), *teacher.parameters()], lr=1e-3)
scaler = torch.amp.GradScaler(device.type)
for step in range(200):
    images = torch.randn(64, 3, 128, 128).to(device)
    labels = torch.randint(100, (64,)).to(device)
    with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
        ours = student(images)
        theirs = teacher(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(ours, labels) + F.cross_entropy(theirs, labels, label_smoothing=0.1)
        loss = loss + F.kl_div(ours.log_softmax(-1), theirs.detach().softmax(-1), reduction="batchmean")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    hits = (ours.argmax(1) == labels).float().mean()
    if not torch.isfinite(loss):
        print("no number")
    print(step, loss.item(), f"{hits:.2f}")
