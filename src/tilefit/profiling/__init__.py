"""Real runs: what the GPU did, kernel by kernel, for which operation, module and line.

with tilefit.profile() as run:
    for batch in batches:
        train_step(batch)
        run.step()
print(run.report)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from tilefit.gpus import Gpu
from tilefit.options import Selection, SelectionKeywords, taken
from tilefit.profiling.session import Profile
from tilefit.report import Report

__all__ = ["Profile", "import_trace", "profile"]


def profile(
    *,
    steps: int | None = None,
    skip: int = 0,
    plain: int = 0,
    gpu: str | Gpu | None = None,
    name: str = "a run",
    calibration: str | os.PathLike[str] | None = None,
    **keywords: Unpack[SelectionKeywords],
) -> Profile:
    """Profile the steps within a ``with`` block; the result's ``report`` says what they spent their time on.

    Nothing that the program computes is changed; it is slower while it is profiled. Call ``step()`` on the
    result at the end of each step; without it the whole block is one.

    Args:
        steps: Steps to profile; None for all that the block makes.
        skip: Steps before anything is measured, for caches, autotuning and compilation.
        plain: Steps after those that are timed without the profiler, to tell what it adds.
        gpu: The GPU that rates are compared with; None for the one in this machine.
        name: What to call the program in the report.
        calibration: As of :func:`tilefit.check`.
        keywords: Which findings are wanted: ``select``, ``ignore``, ``min_gain``, ``per_module_ignores``.

    Raises:
        UsageError: a number is out of range.
    """
    (selection,) = taken("profile", keywords, Selection)
    return Profile(
        steps=steps, skip=skip, plain=plain, gpu=gpu, name=name, calibration=calibration, selection=selection
    )


def import_trace(
    path: str | os.PathLike[str], *, gpu: str | Gpu | None = None, **keywords: Unpack[SelectionKeywords]
) -> Report:
    """The report of a trace that ``torch.profiler`` exported. No GPU is needed.

    Args:
        path: A ``.json`` or ``.json.gz`` file.
        gpu: The GPU it was recorded on; None for the one the trace names.
        keywords: As of :func:`profile`.

    Raises:
        TilefitError: the file is no trace, nothing in it ran on a GPU, or the GPU is not known.
    """
    from tilefit.profiling.imported import Imported

    (selection,) = taken("import_trace", keywords, Selection)
    return Imported(Path(path), gpu, selection=selection).report
