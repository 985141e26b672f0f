"""Real runs: what the GPU did, kernel by kernel, for which operation, module and line.

with tilefit.profile() as run:
    for batch in batches:
        train_step(batch)
        run.step()
print(run.report)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilefit.gpus import Gpu
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
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
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
        select, ignore: Codes of rules or their beginnings, as of :func:`tilefit.check`.

    Raises:
        UsageError: a number is out of range.
    """
    return Profile(
        steps=steps, skip=skip, plain=plain, gpu=gpu, name=name, select=tuple(select), ignore=tuple(ignore)
    )


def import_trace(path: str | os.PathLike[str], *, gpu: str | Gpu | None = None, **rules: Any) -> Report:
    """The report of a trace that ``torch.profiler`` exported. No GPU is needed.

    Args:
        path: A ``.json`` or ``.json.gz`` file.
        gpu: The GPU it was recorded on; None for the one the trace names.
        rules: Further arguments for the rules, as of :func:`tilefit.check`: ``select``, ``ignore``,
            ``min_gain``, ``per_module_ignores``.

    Raises:
        TilefitError: the file is no trace, nothing in it ran on a GPU, or the GPU is not known.
    """
    from tilefit.profiling.imported import Imported

    return Imported(Path(path), gpu, **rules).report
