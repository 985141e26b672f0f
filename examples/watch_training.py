"""A training loop with a mistake that no loss curve shows, watched; and the loop mended.

Run it with: python examples/watch_training.py
"""

from __future__ import annotations

import torch
from torch import nn

from tilefit.precision import watch


def train(clip_too_early: bool) -> None:
    """A few steps of fp16 with a gradient scaler and clipping, on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    with watch(model, optimizer=optimizer, scaler=scaler) as w:
        for _ in range(8):
            x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if not clip_too_early:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    print(w.report())


if __name__ == "__main__":
    train(clip_too_early=True)
    train(clip_too_early=False)
