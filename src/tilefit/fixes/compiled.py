"""Compile the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.fixes.cuda_graph import WAITS
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, Stage
from tilefit.fixes.run import Run
from tilefit.ops import Recurrent, Step

DEFAULT, REDUCE_OVERHEAD = "default", "reduce-overhead"


@dataclass(frozen=True)
class Compilation(ChangeSet):
    """The whole model, compiled in place.

    Attributes:
        mode: ``torch.compile``'s: ``default``, or ``reduce-overhead`` (CUDA graphs).
    """

    mode: str

    @property
    def summary(self) -> str:
        call = "torch.compile(model)" if self.mode == DEFAULT else f'torch.compile(model, mode="{self.mode}")'
        note = "" if self.mode == DEFAULT else "; clone outputs that are to outlive the next call"
        return f"Compile the model: {call}. The first steps wait for the compiler{note}."

    def make(self, run: Run, edits: Edits) -> None:
        edits.run(run, compile=True)
        edits.set(run, "cuda_graph", self.mode == REDUCE_OVERHEAD)
        if not any(parameter.is_meta for parameter in run.model.parameters()):
            compiled = torch.compile(_called(run.model), mode=self.mode)
            edits.set(run.model, "_compiled_call_impl", compiled)


def _called(model: nn.Module) -> Callable[..., Any]:
    """What is compiled of a model: its call, as in ``model.compile()``.

    That starts in PyTorch's own code, which the compiler leaves to Python, and so are the model's hooks. A
    forward that is PyTorch's own as well would be left with it: of an ``nn.Sequential`` no more would be
    compiled than what others wrote inside. There it starts in a function of ours, as ``torch.compile(model)``
    does; hooks that the model gets after its first call are then left out.
    """
    if not str(getattr(model.forward, "__module__", "")).startswith("torch."):
        return model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call


class Compile(Fix):
    """Compiles the model: ``torch.compile`` makes few kernels of its streaming operations.

    Taken up when the other fixes are made, where the step as the compiler would make it is predicted to be
    faster, with the changes that only a compiled model calls for (:class:`~tilefit.fixes.fix.Several`);
    the others are then priced once more, on top of it. Its gain is the fusion of streaming operations
    and the compiler's own padding of misaligned products; convolutions it does not pad. What runs as it was
    written under the compiler (``fuse-attention``, ``merge-projections``) is priced so.

    With ``mode="reduce-overhead"``, for models whose kernels the host cannot launch fast enough, it also
    replays them as CUDA graphs: tensors that a call returned are then written over by the next one, and
    reading them is an error. A model that the compiler splits into parts does not get that mode.

    What it costs: the first call for every set of sizes waits for the compiler, seconds to minutes. The model
    is compiled in place, as ``model.compile()`` does, so that names and ``state_dict`` stay.
    """

    name = "compile"
    rules = ("NTC001",)
    stage = Stage.RUN

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        run, step = context.run, context.step
        if run.cuda_graph:
            return
        if not run.options.compile:
            yield Compilation((), DEFAULT)
        fused = estimate_step(fuse(step), context.gpu)
        if not _in_parts(step) and fused.launch_share > WAITS:
            yield Compilation((), REDUCE_OVERHEAD)


def _in_parts(step: Step) -> bool:
    """Whether the compiler makes several parts of the model, with Python in between that no graph spans.

    Recurrent layers are such Python: the compiler does not look into them.
    """
    return step.settings.split or any(isinstance(entry.op, Recurrent) for entry in step.ops)
