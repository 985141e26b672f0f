"""A U-Net for medical images, trained as beginners do: float32, NCHW, loss of overlap, no mixed precision."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()


class Scans(Dataset):
    def __init__(self, count=4096, size=256):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        image = torch.rand(1, self.size, self.size, generator=generator)
        return image, (image > 0.7).float()


def double(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.d1, self.d2, self.d3, self.d4 = (
            double(1, n),
            double(n, 2 * n),
            double(2 * n, 4 * n),
            double(4 * n, 8 * n),
        )
        self.pool = nn.MaxPool2d(2)
        self.mid = double(8 * n, 16 * n)
        self.u4, self.u3 = nn.ConvTranspose2d(16 * n, 8 * n, 2, 2), nn.ConvTranspose2d(8 * n, 4 * n, 2, 2)
        self.u2, self.u1 = nn.ConvTranspose2d(4 * n, 2 * n, 2, 2), nn.ConvTranspose2d(2 * n, n, 2, 2)
        self.c4, self.c3, self.c2, self.c1 = (
            double(16 * n, 8 * n),
            double(8 * n, 4 * n),
            double(4 * n, 2 * n),
            double(2 * n, n),
        )
        self.out = nn.Conv2d(n, 1, 1)

    def forward(self, x):
        x1 = self.d1(x)
        x2 = self.d2(self.pool(x1))
        x3 = self.d3(self.pool(x2))
        x4 = self.d4(self.pool(x3))
        x = self.mid(self.pool(x4))
        x = self.c4(torch.cat([x4, self.u4(x)], dim=1))
        x = self.c3(torch.cat([x3, self.u3(x)], dim=1))
        x = self.c2(torch.cat([x2, self.u2(x)], dim=1))
        x = self.c1(torch.cat([x1, self.u1(x)], dim=1))
        return torch.sigmoid(self.out(x))


def overlap_loss(p, y, eps=1.0):
    both = (p * y).sum(dim=(1, 2, 3))
    return 1 - ((2 * both + eps) / (p.sum(dim=(1, 2, 3)) + y.sum(dim=(1, 2, 3)) + eps)).mean()


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Scans(), batch_size=16, shuffle=True, num_workers=4, pin_memory=True)
    model, done = UNet().to(device), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    bce = nn.BCELoss()
    for epoch in range(100):
        total = 0.0
        for image, mask in loader:
            image, mask = image.to(device), mask.to(device)
            optimizer.zero_grad()
            made = model(image)
            loss = bce(made, mask) + overlap_loss(made, mask)
            loss.backward()
            optimizer.step()
            total += loss.item()
            done += 1
            if done >= options.steps:
                return
        print("epoch", epoch, total / len(loader))


if __name__ == "__main__":
    main()
