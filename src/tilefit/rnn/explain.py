"""Which backend runs a call, and why: what :func:`tilefit.nn.explain` says of each module."""

from __future__ import annotations

from dataclasses import dataclass

from tilefit.cost.cudnn import STANDARD, cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.rnn.call import Call
from tilefit.rnn.dispatch import Choice, choose, expected, gpu_of
from tilefit.rules.recurrent.adaptations import advice, fewest


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


def explanation(path: str, call: Call, forced: str | None, gpu: Gpu | None) -> Explanation:
    """Which backend runs a call, and why.

    Args:
        path: The module's in the model.
        call: What it runs.
        forced: The backend that the module asks for.
        gpu: See :func:`tilefit.nn.explain`.
    """
    backend, reason = choose(call, forced)
    there = expected(call, gpu, forced) if gpu and call.device is None else None
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
        advice(ops[0], fewest(ops[0], gpu, {op.direction for op in ops})) if failed else "",
    )
