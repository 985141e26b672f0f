"""What a program's step is, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilefit.ops import Step


def described(
    step: Step,
    optimizers: list[Any],
    passes: int,
    batch: int,
    called: Mapping[str, int],
    updates: bool,
    beams: int,
) -> str:
    """Such as ``4 micro-batches of 8, AdamW fused, bf16 autocast``, or ``2 calls of UNet, a batch of 4``."""
    parts = []
    if not step.settings.training:
        parts += [
            f"{f'{count} calls' if count > 1 else 'a call'} of {name}" for name, count in called.items()
        ]
    if passes > 1:
        parts.append(f"{passes} micro-batches of {batch}")
    elif batch:
        of_beams = f"{batch // beams} with {beams} beams each"
        parts.append(f"a batch of {of_beams if beams > 1 else batch}")
    for optimizer in optimizers:
        fused = any(group.get("fused") for group in optimizer.param_groups)
        parts.append(f"{type(optimizer).__name__}{' fused' * fused}")
    settings = step.settings
    if settings.training and not optimizers:
        parts.append("no optimizer" if updates else "gradients alone: no parameter changes")
    if settings.amp:
        parts.append(f"{settings.amp} autocast")
    if any(entry.recomputed for entry in step.ops):
        parts.append("activation checkpointing")
    if settings.training and any(entry.replayed for entry in step.ops):
        parts.append("CUDA graphs")
    if settings.compiled:
        parts.append("compiled, CUDA graphs" if settings.cuda_graph else "compiled")
    return ", ".join(parts)
