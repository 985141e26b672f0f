"""A generator against a discriminator with spectral norms, two optimizers, in float32."""

import argparse

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
steps = parser.parse_args().steps
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True
BATCH, LATENT, WIDTH = 128, 100, 64


def grown(a, b):
    return nn.Sequential(
        nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
    )


def shrunk(a, b):
    return nn.Sequential(spectral_norm(nn.Conv2d(a, b, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True))


generator = nn.Sequential(
    nn.ConvTranspose2d(LATENT, 8 * WIDTH, 4, bias=False), nn.BatchNorm2d(8 * WIDTH), nn.ReLU(True),
    grown(8 * WIDTH, 4 * WIDTH), grown(4 * WIDTH, 2 * WIDTH), grown(2 * WIDTH, WIDTH),
    nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1), nn.Tanh(),
).cuda()  # fmt: skip
critic = nn.Sequential(
    shrunk(3, WIDTH), shrunk(WIDTH, 2 * WIDTH), shrunk(2 * WIDTH, 4 * WIDTH), shrunk(4 * WIDTH, 8 * WIDTH),
    spectral_norm(nn.Conv2d(8 * WIDTH, 1, 4)), nn.Flatten(),
).cuda()  # fmt: skip
ours = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
theirs = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
real, fake = torch.ones(BATCH, 1, device="cuda"), torch.zeros(BATCH, 1, device="cuda")
for step in range(steps):
    images = torch.rand(BATCH, 3, 64, 64).cuda() * 2 - 1
    made = generator(torch.randn(BATCH, LATENT, 1, 1, device="cuda"))
    critic.zero_grad()
    loss_c = criterion(critic(images), real) + criterion(critic(made.detach()), fake)
    loss_c.backward()
    theirs.step()
    generator.zero_grad()
    loss_g = criterion(critic(made), real)
    loss_g.backward()
    ours.step()
    print(f"[{step}/{steps}] critic {loss_c.item():.3f} generator {loss_g.item():.3f}")
