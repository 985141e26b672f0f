"""Compile the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.fixes import attention
from tilefit.fixes.around import arounds
from tilefit.fixes.fix import Candidate, Context, Fix, Refusal, RefusedError, Undo
from tilefit.fixes.run import Run

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
        for path, module in run.model.named_modules():
            if attention.fused in arounds(module):
                raise RefusedError(
                    f"the compiler does not see the fused attention in {path or 'the model'} (fuse-attention)"
                )
        kept = run.compiled, run.cuda_graph, run.model._compiled_call_impl
        run.compiled, run.cuda_graph = True, self.mode == REDUCE_OVERHEAD
        if not any(parameter.is_meta for parameter in run.model.parameters()):
            run.model.compile(mode=self.mode)

        def undo() -> None:
            run.compiled, run.cuda_graph, run.model._compiled_call_impl = kept

        return undo


class Compile(Fix):
    """Compiles the model: ``torch.compile`` makes few kernels of its streaming operations.

    A candidate among the others: it is taken where the step as the compiler would make it is predicted to be
    faster by more than any other change, and the other fixes are then priced on top of it. Its gain is the
    fusion of streaming operations and the compiler's own padding of misaligned products; convolutions it does
    not pad. With ``mode="reduce-overhead"``, for models whose kernels the host cannot launch fast enough, it
    also replays them as CUDA graphs: tensors that a call returned are then written over by the next one, and
    reading them is an error.

    What it costs: the first call for every set of sizes waits for the compiler, seconds to minutes. The model
    is compiled in place (``model.compile()``), so that names and ``state_dict`` stay.

    RefusedError: on top of ``fuse-attention``, which follows calls that the compiler does not make.
    """

    name = "compile"
    rules = ("NTC001",)

    def find(self, context: Context) -> Iterable[Candidate | Refusal]:
        run = context.run
        if run.compiled or run.cuda_graph:
            return
        yield Compilation((), DEFAULT)
        fused = estimate_step(fuse(context.step), context.gpu)
        if fused.host_time_s > fused.gpu_time_s:
            yield Compilation((), REDUCE_OVERHEAD)
