"""What steps that run with real tensors have in common, whoever runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.capture.forward import call, loss_of_output
from tilefit.options import StepOptions


@contextmanager
def tf32(wanted: bool | None) -> Iterator[None]:
    """Within the block, TF32 for fp32 products is on or off; None leaves PyTorch's settings."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        if wanted is not None:
            matmul.allow_tf32 = cudnn.allow_tf32 = wanted
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def loss_of_forward(
    model: Any,
    inputs: Any,
    options: StepOptions,
    loss_of: Callable[[Any], torch.Tensor] | None,
    device: str,
) -> torch.Tensor | None:
    """Run the forward pass, under autocast as the options say; its loss in a training step."""
    dtype = AMP_DTYPES.get(options.autocast, torch.bfloat16)
    amp = torch.autocast(device, dtype=dtype, enabled=bool(options.autocast))
    with torch.set_grad_enabled(options.train), amp:
        output = call(model, inputs)
        return loss_of_output(output, loss_of)[0] if options.train else None


def scaled_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip: float | None) -> None:
    """Step an optimizer through a scaler; ``clip``: the norm of its gradients is cut to so much before."""
    if clip is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
    scaler.step(optimizer)
    scaler.update()
