"""What steps that run with real tensors have in common, whoever runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.capture.forward import call, loss_of_output
from tilefit.capture.optimizer import made_optimizer
from tilefit.capture.tf32 import allow_tf32
from tilefit.options import StepOptions


@contextmanager
def tf32(wanted: bool | None) -> Iterator[None]:
    """Within the block, TF32 for fp32 products is on or off; None leaves PyTorch's settings."""
    with ExitStack() as stack:
        if wanted is not None:
            stack.callback(allow_tf32(wanted))
        yield


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


class RealStep:
    """The step of a model that is captured, with real tensors where the model is: call it.

    With a learning rate of zero the weights stay what they are, and the same kernels run.

    Args:
        model: Compiled here where the options say so and it is not compiled in place.
        inputs, loss_of, options: As for :func:`loss_of_forward`.
        device: Where the model and the inputs are.
        optimizers: Of steps that take turns on the same parameters: one for all of a kind, so that its state
            is there once.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        loss_of: Callable[[Any], torch.Tensor] | None,
        options: StepOptions,
        device: torch.device,
        optimizers: dict[Any, torch.optim.Optimizer] | None = None,
    ) -> None:
        self.device = device
        compiles = options.compile and model._compiled_call_impl is None
        run = torch.compile(model) if compiles else model
        self._model = model
        self._loss = partial(loss_of_forward, run, inputs, options, loss_of, device.type)
        self._clip = options.clip
        # Real gradients under fp16 need the scaler, whose kernels are part of the captured step.
        in_fp16 = options.amp == "fp16" and options.train
        self._scaler = torch.amp.GradScaler(device.type, enabled=in_fp16)
        trainable = [p for p in model.parameters() if p.requires_grad] if options.train else []
        self.optimizer: torch.optim.Optimizer | None = None
        if trainable and options.optimizer != "none":
            shared = {} if optimizers is None else optimizers
            # Its state is laid out like the parameters, which a fix may lay out anew.
            kind = options.fused_optimizer, tuple(parameter.stride() for parameter in trainable)
            if kind not in shared:
                fused = options.fused_optimizer
                shared[kind] = made_optimizer(options.optimizer, trainable, fused=fused, lr=0.0)
            self.optimizer = shared[kind]

    def __call__(self) -> None:
        """Take a step."""
        loss = self._loss()
        if loss is None:
            return
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            scaled_step(self.optimizer, self._scaler, self._clip)
        self._model.zero_grad()
