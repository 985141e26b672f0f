"""Traces that were recorded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilefit.cost.priced import resolve
from tilefit.gpus import Gpu
from tilefit.profiling.measurement import Live, Measured, measure
from tilefit.profiling.trace import read_trace
from tilefit.report import Report


class Imported:
    """A trace that ``torch.profiler`` exported, and what it says. No GPU is needed.

    Args:
        path: A ``.json`` or ``.json.gz`` file.
        gpu: The GPU it was recorded on; None for the one the trace names.
        calibration: A file that ``tilefit calibrate`` wrote; None for the GPU's usual one.
        rules: Further arguments for the rules: ``select``, ``ignore``, ``min_gain``, ``per_module_ignores``.

    Raises:
        TilefitError: the file is no trace, nothing in it ran on a GPU, or the GPU is not known.
    """

    def __init__(
        self, path: Path, gpu: str | Gpu | None = None, calibration: Path | None = None, **rules: Any
    ) -> None:
        trace = read_trace(path)
        (device,) = resolve(gpu or trace.gpu or None, calibration)
        self._path = path
        self._measured: Measured = measure(trace, device, Live(path.name), **rules)

    @property
    def report(self) -> Report:
        """What the operations took, and what is worth changing."""
        return self._measured.report

    def export(self, path: Path) -> None:
        """Write the trace with its operations, modules and findings on tracks of their own.

        Raises:
            UsageError: the file cannot be written.
        """
        from tilefit.profiling.perfetto import annotate

        annotate(self._path, self._measured.steps, self.report, path)
