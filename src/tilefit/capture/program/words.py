"""What a program's step is, in words."""

from __future__ import annotations

from typing import Any

from tilefit.ops import Step


def described(step: Step, optimizers: list[Any], passes: int, batch: int) -> str:
    """Such as ``4 micro-batches of 8, AdamW fused, bf16 autocast``."""
    parts = []
    if passes > 1:
        parts.append(f"{passes} micro-batches of {batch}")
    elif batch:
        parts.append(f"a batch of {batch}")
    for optimizer in optimizers:
        fused = any(group.get("fused") for group in optimizer.param_groups)
        parts.append(f"{type(optimizer).__name__}{' fused' * fused}")
    if not optimizers:
        parts.append("no optimizer")
    settings = step.settings
    if settings.amp:
        parts.append(f"{settings.amp} autocast")
    if any(entry.recomputed for entry in step.ops):
        parts.append("activation checkpointing")
    if settings.compiled:
        parts.append("compiled")
    return ", ".join(parts)
