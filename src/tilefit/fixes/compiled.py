"""Compile the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.fixes.fix import Candidate, Context, Fix, Refusal, Undo
from tilefit.fixes.run import Run
from tilefit.ops import Recurrent, Step

DEFAULT, REDUCE_OVERHEAD = "default", "reduce-overhead"


@dataclass(frozen=True)
class Compilation(Candidate):
    """The whole model, compiled in place.

    Attributes:
        mode: ``torch.compile``'s: ``default``, or ``reduce-overhead`` (CUDA graphs).
    """

    mode: str

    @property
    def summary(self) -> str:
        call = "model.compile()" if self.mode == DEFAULT else f'model.compile(mode="{self.mode}")'
        note = "" if self.mode == DEFAULT else "; clone outputs that are to outlive the next call"
        return f"Compile the model: {call}. The first steps wait for the compiler{note}."

    def apply(self, run: Run) -> Undo:
        kept = run.compiled, run.cuda_graph, run.model._compiled_call_impl
        run.compiled, run.cuda_graph = True, self.mode == REDUCE_OVERHEAD
        if not any(parameter.is_meta for parameter in run.model.parameters()):
            run.model.compile(mode=self.mode)

        def undo() -> None:
            run.compiled, run.cuda_graph, run.model._compiled_call_impl = kept

        return undo


class Compile(Fix):
    """Compiles the model: ``torch.compile`` makes few kernels of its streaming operations.

    Taken up when the other fixes are made, where the step as the compiler would make it is predicted to be
    faster; the others are then priced once more, on top of it. Its gain is the fusion of streaming operations
    and the compiler's own padding of misaligned products; convolutions it does not pad. What runs as it was
    written under the compiler (``fuse-attention``, ``merge-projections``) is priced so.

    With ``mode="reduce-overhead"``, for models whose kernels the host cannot launch fast enough, it also
    replays them as CUDA graphs: tensors that a call returned are then written over by the next one, and
    reading them is an error. A model that the compiler splits into parts does not get that mode.

    What it costs: the first call for every set of sizes waits for the compiler, seconds to minutes. The model
    is compiled in place (``model.compile()``), so that names and ``state_dict`` stay.
    """

    name = "compile"
    rules = ("NTC001",)
    is_last: ClassVar[bool] = True

    def find(self, context: Context) -> Iterable[Candidate | Refusal]:
        run, step = context.run, context.step
        if run.cuda_graph:
            return
        if not run.compiled:
            yield Compilation((), DEFAULT)
        fused = estimate_step(fuse(step), context.gpu)
        if not _in_parts(step) and fused.host_time_s > fused.gpu_time_s:
            yield Compilation((), REDUCE_OVERHEAD)


def _in_parts(step: Step) -> bool:
    """Whether the compiler makes several parts of the model, with Python in between that no graph spans.

    Recurrent layers are such Python: the compiler does not look into them.
    """
    return step.settings.split or any(isinstance(entry.op, Recurrent) for entry in step.ops)
