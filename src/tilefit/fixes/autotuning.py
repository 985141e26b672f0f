"""Let cuDNN time its algorithms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, Stage
from tilefit.fixes.run import Run
from tilefit.ops import Conv


@dataclass(frozen=True)
class Autotuned(ChangeSet):
    """``torch.backends.cudnn.benchmark``, in the whole program."""

    words = "Let cuDNN time its algorithms for each new size: torch.backends.cudnn.benchmark = True."

    def make(self, run: Run, edits: Edits) -> None:
        kept, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        edits.undone_by(lambda: setattr(torch.backends.cudnn, "benchmark", kept))


class CudnnAutotuning(Fix):
    """Turns on ``torch.backends.cudnn.benchmark``, where that was measured to help.

    For every new size of a convolution cuDNN then runs all its algorithms and keeps the fastest, instead of
    the one its heuristic names. The function is the same one; the first call for a size waits, so that it is
    nothing for inputs whose sizes keep changing. What it saves cannot be predicted: of 66 passes of
    convolutions in bf16 on an H200 one in ten became at least 12 % faster, and the median not at all
    (``benchmarks/results/autotuning_h200.json``). So it is no part of a plan that only predicts.
    """

    name = "cudnn-autotuning"
    rules = ()
    stage = Stage.TRIED

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        convolutions = any(isinstance(entry.op, Conv) for entry in context.step.ops)
        if convolutions and not torch.backends.cudnn.benchmark:
            yield Autotuned(())
