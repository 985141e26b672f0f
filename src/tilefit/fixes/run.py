"""A model and the way it is run: what fixes look at and change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tilefit.capture.copies import copied, on_device
from tilefit.capture.optimizer import MakeOptimizer
from tilefit.capture.run import capture
from tilefit.ops import Step


@dataclass(slots=True)
class Run:
    """A model, its inputs and the settings of its step; a fix changes them in place.

    Attributes:
        model: The live module.
        inputs: A tensor, a tuple of positional arguments, a mapping of keyword arguments, or None.
        train: A training step (forward, loss, backward, optimizer); otherwise one inference call.
        amp, tf32, fused_optimizer, channels_last, compiled: As in :func:`tilefit.check`.
        optimizer: Likewise; or what makes one of a list of parameters.
        cuda_graph: The model's kernels are replayed from CUDA graphs, not launched one by one.
        loss: Makes the loss of the model's output.
        live_optimizer: The user's optimizer, if there is one.
    """

    model: nn.Module
    inputs: Any = None
    train: bool = True
    amp: str = ""
    tf32: bool | None = None
    optimizer: str | MakeOptimizer = "adamw"
    fused_optimizer: bool = False
    channels_last: bool = False
    compiled: bool = False
    cuda_graph: bool = False
    loss: Callable[[Any], torch.Tensor] | None = None
    live_optimizer: torch.optim.Optimizer | None = None

    def capture(self) -> Step:
        """The step it executes, on shapes alone.

        Raises:
            CaptureError: the step cannot be captured.
        """
        step = capture(
            self.model,
            self.inputs,
            train=self.train,
            amp=self.amp,
            tf32=self.tf32,
            optimizer=self.optimizer,
            fused_optimizer=self.fused_optimizer,
            channels_last=self.channels_last,
            compiled=self.compiled,
            loss=self.loss,
        )
        return replace(step, settings=replace(step.settings, cuda_graph=self.cuda_graph))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Parameters, buffers, gradients, modes and random numbers are as before at the end of the block."""
        tensors = [(t, t.detach().clone()) for t in (*self.model.parameters(), *self.model.buffers())]
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.zero_grad()
        try:
            with torch.random.fork_rng():
                yield
        finally:
            with torch.no_grad():
                for tensor, value in tensors:
                    tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for module, mode in modes:
                module.training = mode

    def on_meta(self) -> Run:
        """A copy without weights, to try a fix on."""
        return replace(
            self, model=copied(self.model, "meta"), inputs=on_device(self.inputs, "meta"), live_optimizer=None
        )
