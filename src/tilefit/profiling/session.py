"""Runs a program's steps under PyTorch's profiler."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity

from tilefit.capture.dtypes import DTYPES
from tilefit.errors import TilefitError, UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Parameter, Step
from tilefit.options import Selection
from tilefit.profiling.inductor import Compiled
from tilefit.profiling.ranges import ModuleRanges, bare
from tilefit.profiling.trace import Trace, read_trace

if TYPE_CHECKING:
    from tilefit.profiling.attribution import AttributedStep
    from tilefit.profiling.measurement import Measured
    from tilefit.report import Report

#: Steps without the profiler before a script's profiled ones: some for caches and autotuning to settle, and
#: some that are timed, to tell what the profiler adds.
SKIPPED_STEPS = 5
PLAIN_STEPS = 5
PROFILED_STEPS = 3


class Profile:
    """What :func:`tilefit.profile` returns: profiles the steps within its ``with`` block.

    Nothing that the program computes is changed: no random number is drawn, no tensor and no setting touched.
    The program is slower while it is profiled; ``report.measured.overhead`` says how much, where ``plain``
    steps were timed.

    Args:
        steps: Steps to profile; the block goes on without the profiler afterwards. None for all of them.
        skip: Steps before anything is measured.
        plain: Steps after those that are timed without the profiler.
        gpu: The GPU the rates are compared with; None for the one in this machine.
        name: What to call the program in the report.
        captured: The step that is run, if it was captured beforehand.
        optimizer_steps: A step of the first optimizer ends a step; otherwise :meth:`step` does.
        calibration: As of :func:`tilefit.check`.
        selection: Which findings are wanted.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        skip: int = 0,
        plain: int = 0,
        gpu: str | Gpu | None = None,
        name: str = "a run",
        captured: Step | None = None,
        optimizer_steps: bool = False,
        calibration: str | os.PathLike[str] | None = None,
        selection: Selection | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for label, value in (
            ("steps", 1 if steps is None else steps),
            ("skip", skip + 1),
            ("plain", plain + 1),
        ):
            if value < 1:
                raise UsageError(f"{label} must not be {'0 or ' if label == 'steps' else ''}negative")
        self._steps, self._skip, self._plain = steps, skip, plain
        self._gpu, self._calibration, self._selection = gpu, calibration, selection
        self._name, self._captured = name, captured
        self._optimizer_steps, self._clock = optimizer_steps, clock
        #: Called when all steps are profiled; the script that is watched is then ended.
        self.on_end: Callable[[], None] = lambda: None
        self._ranges = ModuleRanges()
        self._compiled = Compiled()
        self._stack = ExitStack()
        self._profiler: Any = None
        self._mark: Any = None
        self._optimizer: Any = None
        self._number, self._began_s = 0, 0.0
        self._times_s: list[float] = []
        self._folder = tempfile.TemporaryDirectory(prefix="tilefit-")
        self._file = Path(self._folder.name) / "trace.json"

    def __enter__(self) -> Self:
        self._stack.enter_context(self._ranges.marking())
        self._stack.enter_context(self._compiled.watching())
        if self._optimizer_steps:
            self._stack.callback(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
        self._begin_step()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._mark is not None and (self._number > self._skip + self._plain) and raised[0] is not None:
            self._drop_mark()  # what was interrupted is no whole step
        self._stop()
        self._stack.close()

    def step(self) -> None:
        """The end of a step."""
        self._end_step()
        self._begin_step()

    # ---- results ---------------------------------------------------------------------------------

    @property
    def profiled(self) -> bool:
        """Whether anything was profiled."""
        return self._file.exists()

    @cached_property
    def trace(self) -> Trace:
        """What the profiler saw.

        Raises:
            TilefitError: nothing was profiled, or nothing ran on a GPU.
        """
        if not self.profiled:
            raise TilefitError(
                f"nothing was profiled: the program ended in step {self._number + 1}",
                hint=f"Profiling begins after {self._skip + self._plain} steps; let it make more, or give a "
                "smaller --skip and --plain (skip=, plain=).",
            )
        return read_trace(self._file)

    @property
    def report(self) -> Report:
        """The report of the profiled steps.

        Raises:
            TilefitError: as of :attr:`trace`; or the GPU is not known.
        """
        return self._result.report

    @property
    def steps(self) -> list[AttributedStep]:
        """The profiled steps: every call with its kernels and where it comes from."""
        return self._result.steps

    @cached_property
    def _result(self) -> Measured:
        from tilefit.cost.priced import resolve
        from tilefit.profiling.measurement import Live, measure

        trace = self.trace
        (gpu,) = resolve(self._gpu or trace.gpu or None, self._calibration)
        modules = {bare(path): name for path, name in self._ranges.classes.items()}
        live = Live(self._name, self._parameters(), modules, tuple(self._times_s), self._compiled)
        return measure(trace, gpu, live, self._captured, self._selection)

    def export(self, path: str | Path) -> None:
        """Write the trace with its operations, modules and findings on tracks of their own, for Perfetto.

        Raises:
            TilefitError: as of :attr:`report`; or the file cannot be written.
        """
        from tilefit.profiling.perfetto import annotate

        annotate(self._file, self.steps, self.report, Path(path))

    def _parameters(self) -> dict[str, Parameter]:
        return {
            bare(prefix + name): Parameter(
                tuple(parameter.shape), DTYPES.get(parameter.dtype, "fp32"), (), parameter.requires_grad
            )
            for prefix, model in self._ranges.roots
            for name, parameter in model.named_parameters()
        }

    # ---- steps -----------------------------------------------------------------------------------

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self.step()

    def _begin_step(self) -> None:
        if self._number == self._skip + self._plain:
            self._start()
        if self._profiler is not None:
            self._mark = torch.profiler.record_function(f"ProfilerStep#{self._number}")
            self._mark.__enter__()
        elif self._skip <= self._number < self._skip + self._plain:
            _synchronize()
        self._began_s = self._clock()

    def _end_step(self) -> None:
        if self._profiler is not None:
            self._drop_mark()
        elif self._skip <= self._number < self._skip + self._plain:
            _synchronize()
            self._times_s.append(self._clock() - self._began_s)
        self._number += 1
        if self._steps is not None and self._number == self._skip + self._plain + self._steps:
            self._stop()
            self.on_end()

    def _drop_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.__enter__()

    def _stop(self) -> None:
        if self._profiler is None:
            return
        self._drop_mark()
        _synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        profiler.export_chrome_trace(str(self._file))


def require_gpu() -> None:
    """Check that there is something to profile.

    Raises:
        UsageError: PyTorch finds no GPU.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "PyTorch finds no CUDA GPU in this machine",
            hint="Profile where there is one, or import a trace: tilefit profile trace.json.gz; "
            "tilefit check predicts without a GPU.",
        )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
