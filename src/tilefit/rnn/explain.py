"""Says which backend runs a model's recurrent modules, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tilefit import gpus
from tilefit.cost.cudnn import STANDARD, cudnn_algorithm
from tilefit.errors import UsageError
from tilefit.gpus import Gpu
from tilefit.rnn.dispatch import Call, Choice, choose, expected, gpu_of
from tilefit.rnn.modules import Recurrent
from tilefit.rules.recurrent.algorithm import cheapest_change


@dataclass(frozen=True)
class Algorithm:
    """What cuDNN runs a module with on a GPU, as PyTorch asks it to (see :func:`cudnn_algorithm`).

    Attributes:
        gpu: Name of the GPU.
        forward, backward: Names of the algorithms; ``backward`` is empty for inference.
        failed: The first condition of the persistent algorithm that the module misses; empty if it persists.
        change: The fewest changes that make every pass persist; empty if there are none, or none are needed.
    """

    gpu: str
    forward: str
    backward: str
    failed: str
    change: str

    def __str__(self) -> str:
        passes = self.forward + (f" forward, {self.backward} backward" if self.backward else "")
        if not self.failed:
            return f"{passes} on {self.gpu}"
        change = f"it would with this change: {self.change}" if self.change else "no change makes it"
        return f"{passes} on {self.gpu}, which does not persist ({self.failed}); {change}"


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a module, and why.

    Attributes:
        module: Its path in the model; empty for the model itself.
        call: What it runs.
        backend: ``persistent``, ``cudnn``, ``cell`` or ``reference``; all its layers run by the same.
        reason: Why this one.
        algorithm: What cuDNN does, or would do, with it; None if the GPU is not known.
        there: What would run it on the GPU that was named, where it did not run on one; None if measurements
            do not tell.
    """

    module: str
    call: Call
    backend: str
    reason: str
    algorithm: Algorithm | None
    there: Choice | None = None

    def __str__(self) -> str:
        op = self.call.op()
        purpose = "training" if self.call.training else "inference"
        purpose += ", in a CUDA graph" if self.call.captured else ""
        lines = [
            f"{self.module or op.mode}: {op.shape}, {self.call.dtype}, {purpose}".replace("torch.", ""),
            f"  {self.backend}: {self.reason}",
            f"  cuDNN: {self.algorithm or 'name a known GPU (gpu=) to see its algorithm'}",
        ]
        if self.algorithm and self.there:
            lines.insert(2, f"  on {self.algorithm.gpu} {self.there.backend}: {self.there.reason}")
        return "\n".join(lines)


class Explanations(tuple[Explanation, ...]):
    """The explanations of a model's recurrent modules, in the model's order; printed one below the other."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__  # what a notebook shows


def explain(model: nn.Module, *inputs: Any, gpu: str = "", **arguments: Any) -> Explanations:
    """Which backend runs each of our recurrent modules in a model, and why.

    Args:
        model: A model, or a recurrent module.
        *inputs, **arguments: The model is called once with them, as it is. Without any, the last call tells.
        gpu: Name of the GPU to tell for what cuDNN's algorithm is there, and of a module that ran on none
            which backend would be; empty: the one the module ran on.

    Raises:
        UsageError: no module of ours was called, or the GPU is unknown.
        TilefitError: the backend a module is told to use cannot run it.
    """
    if inputs or arguments:
        model(*inputs, **arguments)
    named = gpus.get(gpu) if gpu else None
    found = Explanations(
        _explained(path, module, module.last_call, named)
        for path, module in model.named_modules()
        if isinstance(module, Recurrent) and module.last_call is not None
    )
    if not found:
        raise UsageError(
            "no recurrent module of tilefit ran",
            hint="Give inputs to run the model with; tilefit.nn.convert(model) converts torch.nn's modules.",
        )
    return found


def _explained(path: str, module: Recurrent, call: Call, gpu: Gpu | None) -> Explanation:
    backend, reason = choose(call, module.backend)
    there = expected(call, gpu, module.backend) if gpu and call.device is None else None
    if gpu is None and call.device is not None:
        gpu = gpu_of(call.device)
    return Explanation(path, call, backend, reason, algorithm(call, gpu) if gpu else None, there)


def algorithm(call: Call, gpu: Gpu) -> Algorithm:
    """What cuDNN runs a call with on a GPU."""
    ops = [call.op()] + ([call.op(backward=True)] if call.training else [])
    found = [cudnn_algorithm(op, gpu) for op in ops]
    failed = next((condition for name, condition in found if name == STANDARD), "")
    return Algorithm(
        gpu.name,
        found[0][0],
        found[1][0] if call.training else "",
        failed,
        cheapest_change(ops[0], gpu, {op.direction for op in ops}) if failed else "",
    )
