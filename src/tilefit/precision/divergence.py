"""Where two equal runs part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.precision.events import Diverged, Event
from tilefit.precision.lines import user_line
from tilefit.precision.replay import judged, restored
from tilefit.precision.tensors import tensors_in
from tilefit.report.watched import Watched

#: A module call or a gradient: its name, the line that made it, and a hash of its bits.
_Trace = list[tuple[str, str, bytes]]


def first_divergence(model: nn.Module, step: Callable[[], Tensor]) -> Watched:
    """Run a step twice from the same state and name the first module that does not give the same bits.

    Weights, buffers, gradients and random numbers are put back before, between and after the runs.

    Args:
        model: The model.
        step: Runs the forward pass, with its own autocast, and returns the loss.

    Returns:
        A report with AMP028 where the runs differ.
    """
    with restored(model) as again:
        first = _run(model, step)
        again()
        second = _run(model, step)
    events: list[Event] = []
    for index, (before, after) in enumerate(zip(first, second, strict=False)):
        if before != after:
            events.append(
                Diverged(
                    source=after[1],
                    module=after[0],
                    calls=index,
                    deterministic=torch.are_deterministic_algorithms_enabled(),
                )
            )
            break
    return judged(type(model).__name__, events)


def _run(model: nn.Module, step: Callable[[], Tensor]) -> _Trace:
    trace: _Trace = []
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}

    def left(module: nn.Module, args: Any, output: Any) -> None:
        tensors = tensors_in([output])
        trace.append((names[module], user_line(), b"".join(map(_digest, tensors))))

    handles = [module.register_forward_hook(left) for module in names]
    try:
        step().backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    # Gradients come about from the last to the first: so are they compared.
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None:
            trace.append((f"the gradient of {name}", "", _digest(parameter.grad)))
    return trace


def _digest(tensor: Tensor) -> bytes:
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=16).digest()
