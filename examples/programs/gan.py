"""A DCGAN on CIFAR-10: two optimizers take turns.

tilefit check examples/programs/gan.py --gpu h200 --fake-data
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image


class Generator(nn.Sequential):
    def __init__(self, latent: int, width: int) -> None:
        super().__init__(
            nn.ConvTranspose2d(latent, 4 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(3, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False),
            nn.Flatten(0),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--latent", type=int, default=100)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    transform = transforms.Compose(
        [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    )
    images = datasets.CIFAR10("data", download=True, transform=transform)
    loader = DataLoader(images, options.batch_size, shuffle=True, num_workers=4, drop_last=True)
    generator, discriminator = Generator(options.latent, 64).to(device), Discriminator(64).to(device)
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    fixed = torch.randn(64, options.latent, 1, 1, device=device)

    for epoch in range(options.epochs):
        for step, (real, _) in enumerate(loader):
            real = real.to(device)
            noise = torch.randn(len(real), options.latent, 1, 1, device=device)
            fake = generator(noise)

            for_discriminator.zero_grad()
            scores = discriminator(real)
            loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            scores = discriminator(fake.detach())
            loss = loss + F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))
            loss.backward()
            for_discriminator.step()

            for_generator.zero_grad()
            scores = discriminator(fake)
            fooled = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            fooled.backward()
            for_generator.step()
            if step % 50 == 0:
                print(f"epoch {epoch} step {step}: {loss.item():.3f} {fooled.item():.3f}")
        with torch.no_grad():
            save_image(generator(fixed), f"samples_{epoch}.png", normalize=True)


if __name__ == "__main__":
    main()
