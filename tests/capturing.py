"""Short ways to capture a few lines of PyTorch and to look at what was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tilefit.capture import capture
from tilefit.ops import FORWARD, Gemm, Op, Step, StepOp


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Within the block layers leave their parameters as memory is: for models of which only shapes are read.

    Drawing the numbers of large layers takes longer than capturing them.
    """
    with ExitStack() as stack:
        for name in ("kaiming_uniform_", "xavier_uniform_", "uniform_", "normal_"):
            stack.enter_context(patch.object(nn.init, name, lambda tensor, *_, **__: tensor))
        yield


class Lines(nn.Module):
    """A module whose forward is a function of the module and its inputs; ``parts`` are its modules."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def captured(
    function: Callable[..., Any],
    *inputs: Any,
    parts: dict[str, nn.Module | nn.Parameter] | None = None,
    optimizer: str = "none",
    **options: Any,
) -> Step:
    """The step of a function of (module, *inputs)."""
    return capture(Lines(function, **(parts or {})), inputs, optimizer=optimizer, **options)


def entries(step: Step, kind: type[Op] | str, phase: str = "") -> list[StepOp]:
    """The operations of a class, or of a name such as ``mm``, in a phase."""
    return [
        entry
        for entry in step.ops
        if (entry.name.removeprefix("aten.") == kind if isinstance(kind, str) else isinstance(entry.op, kind))
        and phase in ("", entry.phase)
    ]


def products(step: Step, phase: str = "") -> list[tuple[str, int, int, int, str]]:
    """(phase, m, n, k, layout) of every matrix product."""
    return [
        (entry.phase, entry.op.m, entry.op.n, entry.op.k, entry.op.layout)
        for entry in entries(step, Gemm, phase)
        if isinstance(entry.op, Gemm)
    ]


def names(step: Step, phase: str = FORWARD) -> list[str]:
    """Names of the operations of a phase, in order."""
    return [entry.name.removeprefix("aten.") for entry in step.ops if entry.phase == phase]


def rows(*sizes: int, requires_grad: bool = False) -> torch.Tensor:
    """An input without data that takes a gradient if asked, as a hidden activation would."""
    return torch.empty(sizes, device="meta", requires_grad=requires_grad)
