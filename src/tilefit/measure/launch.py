"""What launching costs on this host, against the host whose constants the cost model has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import exp, hypot, log
from statistics import median, quantiles

import torch
from torch import nn

from tilefit.cost.calibration import Calibration
from tilefit.cost.launch import KNOWN_HOST, REFERENCE_STEP_S

#: Few enough steps that a calibration can spare the time, and enough that some meet a quiet host.
_STEPS, _REPEATS = 5, 8


def launch_scale(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """:attr:`Host.scale`, of turns one after another."""
    return Host(device, clock, _REPEATS).scale


class Host:
    """Times a training step, in turns over as long as one likes: what else runs on a host makes it slower for
    seconds or minutes.

    A step and not a call in a loop: most of what the host does in a step is the Python of the modules,
    autograd and the optimizer, which one call after another says nothing about.

    Args:
        device: Where the step runs; its tensors are so small that the host is slower than the device.
        clock: Seconds.
        turns: So many at once, two at least.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter, turns: int = 2
    ) -> None:
        self._step = reference_step(device)
        self._synchronize: Callable[[], object] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )
        self._clock = clock
        self._times: list[float] = []
        for _ in range(_STEPS - 1):
            self._step()
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        """Time a few more steps, after one that allocates anew what capturing a graph has freed since."""
        self._step()
        self._synchronize()
        began_s = self._clock()
        for _ in range(_STEPS):
            self._step()
        self._synchronize()
        self._times.append((self._clock() - began_s) / _STEPS)

    @property
    def scale(self) -> float:
        """Host time of the step over :data:`tilefit.cost.launch.REFERENCE_STEP_S`, that of the host whose
        constants the cost model has."""
        return median(self._times) / REFERENCE_STEP_S

    @property
    def spread(self) -> float:
        """What steps take may be so many times what the scale says, or as little (80 %): the model's own
        error, and how much the turns differ."""
        least, *_, most = quantiles(self._times, n=10)
        return exp(hypot(log(KNOWN_HOST), log(most / least) / 2))

    def noted(self, found: Calibration) -> Calibration:
        """A calibration with what was found of this host."""
        about = {**found.about, "launch_scale": self.scale, "launch_spread": self.spread}
        return replace(found, launch_scale=self.scale, about=about)


def reference_step(device: torch.device) -> Callable[[], None]:
    """A training step of a small transformer and a small convolutional network with AdamW, under bf16
    autocast, or fp16 where cuDNN has no bf16 convolution (Turing, Volta): it takes what the host takes."""
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
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
        with torch.autocast(device.type, dtype=dtype):
            loss = encoder(tokens).float().mean() + images(pixels).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
