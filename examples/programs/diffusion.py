"""A U-Net that learns to remove noise from images in folders, with a moving average of its weights.

tilefit check examples/programs/diffusion.py --gpu h200 --fake-data
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Images(Dataset):
    def __init__(self, folder, size):
        self.paths = sorted(Path(folder).glob("*.jpg"))
        self.transform = transforms.Compose(
            [
                transforms.Resize(size),
                transforms.CenterCrop(size),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.5] * 3),
            ]
        )

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, times):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.time = nn.Linear(times, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(8, width), nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(x).flatten(2).transpose(1, 2)
        y, _ = self.inner(y, y, y, need_weights=False)
        return x + y.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        times = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.down1, self.down2 = Residual(width, width, times), Residual(width, 2 * width, times)
        self.middle, self.attention = Residual(2 * width, 2 * width, times), Attention(2 * width)
        self.up2, self.up1 = Residual(4 * width, width, times), Residual(2 * width, width, times)
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, 1, 1))

    def forward(self, x, steps):
        rates = torch.exp(-9.2 * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = steps[:, None].float() * rates[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        first = self.down1(self.first(x), time)
        second = self.down2(F.avg_pool2d(first, 2), time)
        y = self.attention(self.middle(F.avg_pool2d(second, 2), time))
        y = self.up2(torch.cat([F.interpolate(y, scale_factor=2), second], dim=1), time)
        y = self.up1(torch.cat([F.interpolate(y, scale_factor=2), first], dim=1), time)
        return self.last(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="data/flowers")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    loader = DataLoader(
        Images(options.images, options.size), options.batch_size, shuffle=True, num_workers=8, pin_memory=True
    )
    model = UNet().to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
    for epoch in range(100):
        for images in loader:
            images = images.to(device, non_blocking=True)
            noise = torch.randn_like(images)
            steps = torch.randint(0, 1000, (images.shape[0],), device=device)
            share = kept[steps][:, None, None, None]
            noisy = share.sqrt() * images + (1 - share).sqrt() * noise
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = F.mse_loss(model(noisy, steps), noise)
            if torch.isnan(loss):
                raise RuntimeError("the loss is no number")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                for smooth, weight in zip(average.parameters(), model.parameters(), strict=True):
                    smooth.mul_(0.999).add_(weight, alpha=0.001)
        print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
