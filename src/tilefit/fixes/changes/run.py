"""A model and the way it is run: what fixes look at and change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tilefit.capture.copies import copied, on_device
from tilefit.capture.run import capture
from tilefit.cost.footprint import usable_bytes
from tilefit.cost.fusion import fuse
from tilefit.fixes.changes.behaviour import behaviours
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.ops.scaling import scale_batch
from tilefit.options import StepOptions


@dataclass(slots=True)
class Run:
    """A model, its inputs and the settings of its step; a fix changes them in place.

    Attributes:
        model: The live module.
        inputs: A tensor, a tuple of positional arguments, a mapping of keyword arguments, or None.
        options: How the step runs.
        cuda_graph: The model's kernels are replayed from CUDA graphs, not launched one by one.
        loss: Makes the loss of the model's output.
        live_optimizer: The user's optimizer, if there is one.
        samples: Of the step that is captured, over those of the inputs. Where real data is needed, a step on
            few samples is captured and scaled.
        memory_bytes: What its step may take at most; None for what fits the GPU.
    """

    model: nn.Module
    inputs: Any = None
    options: StepOptions = field(default_factory=StepOptions)
    cuda_graph: bool = False
    loss: Callable[[Any], torch.Tensor] | None = None
    live_optimizer: torch.optim.Optimizer | None = None
    samples: float = 1.0
    memory_bytes: float | None = None

    def budget_bytes(self, gpu: Gpu) -> float:
        """Bytes that the step's tensors may take at once."""
        return usable_bytes(gpu) if self.memory_bytes is None else self.memory_bytes

    def capture(self) -> Step:
        """The step it executes, on shapes alone unless its options say otherwise.

        Raises:
            CaptureError: the step cannot be captured.
        """
        step = capture(self.model, self.inputs, options=self.options, loss=self.loss)
        if self.samples != 1.0:
            step = scale_batch(step, self.samples)
        return replace(step, settings=replace(step.settings, cuda_graph=self.cuda_graph))

    def change(self, **options: Any) -> Callable[[], None]:
        """Change how the step runs; what is returned takes it back."""
        before = self.options, self.cuda_graph
        self.cuda_graph = options.pop("cuda_graph", self.cuda_graph)
        self.options = replace(self.options, **options)
        return partial(self._become, *before)

    def _become(self, options: StepOptions, cuda_graph: bool) -> None:
        self.options, self.cuda_graph = options, cuda_graph

    def compiled(self, step: Step) -> Step:
        """The step that was captured, with what of the model is compiled as the compiler makes it."""
        if self.options.compile:
            return fuse(step)
        modules = self.model.named_modules()
        parts = [path for path, module in modules if any(each.is_compiled for each in behaviours(module))]
        return fuse(step, parts) if parts else step

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
        """A copy without weights, to try a fix on; inputs of a capture on the CPU keep their values."""
        inputs = self.inputs if self.options.on_cpu else on_device(self.inputs, "meta")
        return replace(self, model=copied(self.model, "meta"), inputs=inputs, live_optimizer=None)
