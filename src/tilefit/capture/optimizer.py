"""The optimizer's part of a step, as CUDA would run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.amp import GradScaler

from tilefit.capture.aten import multi_tensor_launches, touched_bytes
from tilefit.capture.recorder import Recorder
from tilefit.ops import OPTIMIZER, Streaming

#: What ``--optimizer`` can name.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on the device."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )


class OptimizerSteps:
    """Runs optimizers with the multi-tensor kernels CUDA would use, and remembers their state's size."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.optimizer_bytes = 0
        self.name = ""
        self.fused = False

    def run(self, optimizer: torch.optim.Optimizer, step: Any) -> None:
        """Record one step of ``optimizer`` whose original method is ``step``."""
        self.name = type(optimizer).__name__.lower()
        self.fused = any(group.get("fused") for group in optimizer.param_groups)
        groups = [{k: group.get(k) for k in ("fused", "foreach")} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if "foreach" in group:
                # Without a word from the user CUDA takes the multi-tensor path; ``foreach=False`` is a word.
                group.update(fused=None, foreach=group["foreach"] is not False)
        try:
            with self.recorder.phase(OPTIMIZER), torch.device("cpu"), torch.no_grad():
                if not optimizer.state:
                    with self.recorder.silent():
                        step(optimizer)  # creates the state, as a run's first step does
                self.optimizer_bytes += state_bytes(optimizer)
                if self.fused:
                    with self.recorder.silent():
                        step(optimizer)
                    self._record_fused(optimizer)
                else:
                    step(optimizer)
        finally:
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update({k: v for k, v in kept.items() if k in group})

    def _record_fused(self, optimizer: torch.optim.Optimizer) -> None:
        """One pass: read parameter, gradient and state, write parameter and state."""
        pairs = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        parameters = sum(touched_bytes(p) for p, _ in pairs)
        gradients = sum(touched_bytes(g) for _, g in pairs)
        state = state_bytes(optimizer)
        elements = sum(p.numel() for p, _ in pairs)
        op = Streaming(
            role="optimizer",
            elements=elements,
            read_bytes=parameters + gradients + state,
            write_bytes=parameters + state,
            flop_per_element=12,
            kernels=multi_tensor_launches(len(pairs), elements, 4),
        )
        self.recorder.record(op, f"fused_{self.name}", (), ())

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what ``GradScaler`` does to the gradients before a step: divide and look for infinities."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        total = sum(map(touched_bytes, gradients))
        elements = sum(g.numel() for g in gradients)
        op = Streaming(
            "optimizer", elements, total, total, kernels=multi_tensor_launches(len(gradients), elements, 1)
        )
        with self.recorder.phase(OPTIMIZER):
            self.recorder.record(op, "aten._amp_foreach_non_finite_check_and_unscale_", (), ())


@contextmanager
def intercepted(steps: OptimizerSteps) -> Iterator[None]:
    """Within the block every optimizer's step, and every GradScaler, is recorded as CUDA would run it."""

    def recording(original: Any) -> Any:
        def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            steps.run(self, original)
            return loss

        return step

    def scale(self: GradScaler, outputs: Any) -> Any:
        return outputs * 1.0 if isinstance(outputs, torch.Tensor) else [o * 1.0 for o in outputs]

    def unscale(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        steps.unscale(optimizer)
        self.__dict__.setdefault("_tilefit_unscaled", set()).add(id(optimizer))

    def scaler_step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if id(optimizer) not in self.__dict__.get("_tilefit_unscaled", ()):
            steps.unscale(optimizer)
        self.__dict__.pop("_tilefit_unscaled", None)
        return optimizer.step(*args, **kwargs)

    def update(self: GradScaler, new_scale: Any = None) -> None:
        return None

    # The decorator of these two imports the whole compiler, which takes longer than a capture.
    undecorated = {
        name: getattr(method, "__wrapped__", method)
        for name in ("add_param_group", "zero_grad")
        for method in [torch.optim.Optimizer.__dict__[name]]
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.optim.Optimizer, **undecorated))
        for cls in _subclasses(torch.optim.Optimizer):
            if "step" in cls.__dict__:
                stack.enter_context(patch.object(cls, "step", recording(cls.__dict__["step"])))
        stack.enter_context(
            patch.multiple(GradScaler, scale=scale, unscale_=unscale, step=scaler_step, update=update)
        )
        yield


def _subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
