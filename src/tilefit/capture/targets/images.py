"""Models of images, of whichever library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilefit.capture.inputs import DEFAULT_CLIP_BATCH, DEFAULT_IMAGE_BATCH, make, parse_inputs
from tilefit.capture.targets.base import Target, inputs_hint
from tilefit.capture.trees import tensors
from tilefit.options import TargetOptions


def image_target(
    name: str, model: nn.Module, channels: int, size: int, options: TargetOptions, frames: int = 0
) -> Target:
    """Images, or clips of so many frames."""
    if options.input:
        return Target(model, parse_inputs(options.input, options.device), name, _image_loss)
    options.refuse_sizes("images have no tokens", ["seq"])
    batch = options.batch or (DEFAULT_CLIP_BATCH if frames else DEFAULT_IMAGE_BATCH)
    shape = (batch, channels, *([frames] if frames else []), size, size)
    inputs = (make(shape, torch.float32, options.device),)
    return Target(model, inputs, name, _image_loss, hint=inputs_hint(inputs))


def _image_loss(output: Any) -> torch.Tensor:
    """Cross-entropy of every output with a class dimension (segmentation and auxiliary heads too)."""
    losses = []
    for scores in tensors(output):
        labels = torch.zeros((scores.shape[0], *scores.shape[2:]), dtype=torch.int64, device=scores.device)
        losses.append(nn.functional.cross_entropy(scores, labels))
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
