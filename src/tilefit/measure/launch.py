"""What launching costs on this host, against the host whose constants the cost model has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from tilefit.cost.launch import REFERENCE_STEP_S

#: Few enough steps that a calibration can spare the time, and enough that some meet a quiet host.
_STEPS, _REPEATS = 5, 8


def launch_scale(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Host time of a training step over :data:`tilefit.cost.launch.REFERENCE_STEP_S`, that of the host whose
    constants the cost model has.

    A step and not a call in a loop: most of what the host does in a step is the Python of the modules,
    autograd and the optimizer, which one call after another says nothing about.

    Args:
        device: Where the step runs; its tensors are so small that the host is slower than the device.
        clock: Seconds.
    """
    step = reference_step(device)
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(_STEPS):
        step()
    times = []
    for _ in range(_REPEATS):
        synchronize()
        began_s = clock()
        for _ in range(_STEPS):
            step()
        synchronize()
        times.append((clock() - began_s) / _STEPS)
    # What else the host does can only make it slower.
    return statistics.quantiles(times, n=4)[0] / REFERENCE_STEP_S


def reference_step(device: torch.device) -> Callable[[], None]:
    """A training step of a small transformer and a small convolutional network, under bf16 autocast with
    AdamW: what it takes is the host's time."""
    encoder = nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 2, 128, activation="gelu", batch_first=True) for _ in range(4))
    )
    images = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4))
    )
    model = nn.ModuleList([encoder, images]).to(device).train()
    tokens, pixels = torch.randn(2, 16, 64, device=device), torch.randn(2, 8, 8, 8, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = encoder(tokens).float().mean() + images(pixels).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
