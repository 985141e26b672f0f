"""Runs a program until its step is captured."""

from __future__ import annotations

import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tilefit.capture.inputs import batch_of
from tilefit.capture.program.contained import Surroundings, contained
from tilefit.capture.program.distributed import one_rank, rank_notes
from tilefit.capture.program.finding import StepFinder
from tilefit.capture.program.habits import Habits
from tilefit.capture.program.invariants import check_step
from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.program.words import described
from tilefit.capture.script import failure, run_as_main
from tilefit.capture.sites import user_line
from tilefit.errors import CaptureError, TilefitError
from tilefit.gpus import Gpu
from tilefit.ops import Settings, Step
from tilefit.ops.program import Loader, Program
from tilefit.options import ProgramOptions

#: Takes the step, or what went wrong, and ends the process: nothing that the program would do then is done.
Done = Callable[[Step | TilefitError], NoReturn]


def capture_program(
    options: ProgramOptions, gpu: Gpu, folder: Path, done: Done, told: Callable[[str], None]
) -> NoReturn:
    """Run a program in this process, which ends with it, and capture the step that it makes.

    Args:
        options: The program, its arguments, and which of its steps.
        gpu: What it is told that it runs on.
        folder: Where the files go that it writes.
        done: Takes what came of it.
        told: Gets what it is at.
    """
    try:
        with contained(folder, fake=options.fake_data) as around:
            modes = ProgramModes(gpu)
            capture = _Capture(modes, options, around, done, told)
            with one_rank(), modes.running(), capture.finder.watching(), capture.habits.watching():
                error = _run(options, around)
        result = error or _no_step(capture.finder, options)
    except TilefitError as refused:
        result = refused
    done(result)


def _run(options: ProgramOptions, around: Surroundings) -> TilefitError | None:
    """Run the program as Python does; returns what went wrong in it."""
    script = Path(options.program)
    sys.argv = [options.program, *options.arguments]
    sys.path.insert(0, os.getcwd() if options.is_module else str(script.resolve().parent))
    try:
        if options.is_module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            run_as_main(script)
    except TilefitError as error:
        error.where = error.where or user_line(error)
        return error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's program may raise
        if explained := around.explained(error):
            return explained
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        return failure(error, options.program, "The program failed on the emulated GPU; see above.")
    return None


def _no_step(finder: StepFinder, options: ProgramOptions) -> TilefitError:
    wanted = options.skip + options.steps
    if finder.taken:
        return CaptureError(
            f"the program ended after {finder.taken} of the {wanted} optimizer steps that are needed",
            where=options.program,
            hint="Give it more data or epochs by its own arguments.",
        )
    return CaptureError(
        "the program ended without a training step: no optimizer stepped, and no backward pass ran",
        where=options.program,
        hint="Give the arguments with which it trains, after --.",
    )


class _Capture:
    """What is noted while the step runs, and made of it at its end."""

    def __init__(
        self,
        modes: ProgramModes,
        options: ProgramOptions,
        around: Surroundings,
        done: Done,
        told: Callable[[str], None],
    ) -> None:
        self.modes, self.options, self.around = modes, options, around
        self.done, self.told = done, told
        self.finder = StepFinder(options.skip, options.steps, self._begin, self._end)
        self.habits = Habits(modes.sites.source_line, lambda: (modes.recorder.ops, modes.meetings.events))
        self._inputs: Any = None
        self._calls: dict[int, int] = {}

    def _begin(self) -> None:
        self.told("its step")
        self.around.loaders.stepped()
        self.modes.start()
        call = nn.Module.__call__
        roots = self.modes.sites

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if (
                not roots._stack
                and torch.is_grad_enabled()
                and any(module is root for _, root in roots.roots)
            ):
                self._calls[id(module)] = self._calls.get(id(module), 0) + 1
                if self._inputs is None:
                    self._inputs = _named(module, args, kwargs)
            return call(module, *args, **kwargs)

        nn.Module.__call__ = called  # type: ignore[method-assign]

    def _end(self) -> NoReturn:
        # Within the program, which may catch whatever is raised.
        with torch._C.DisableTorchFunction():
            try:
                result: Step | TilefitError = self._step()
            except TilefitError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - told as it would be outside of the program
                traceback.print_exc()
                result = CaptureError(f"{type(error).__name__}: {error}", hint="This is a bug in tilefit.")
            self.done(result)

    def _step(self) -> Step:
        modes, finder, options = self.modes, self.finder, self.options
        modes.recorder.muted = True
        check_step(modes, finder)
        batch = batch_of(self._inputs, modes.recorder.ops)
        passes = max(self._calls.values(), default=1) if len(finder.stepped) <= 1 else 1
        modes.count_optimizer_state()
        settings = Settings(
            training=True,
            amp=modes.amp_seen,
            tf32=modes.recorder.tf32_matmul,
            optimizer=modes.steps.name,
            fused_optimizer=modes.steps.fused,
            channels_last=modes.channels_last_seen,
            compiled=modes.compiles,
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cuda_graph=modes.meetings.graphs,
        )
        name = options.program
        step = modes.step(settings, name, self._inputs, [*modes.unseen_notes, *rank_notes()])
        habits = self.habits.found()  # names events, too
        program = Program(
            command=" ".join([name, *options.arguments]),
            step=described(step, finder.stepped, passes, batch, modes),
            steps=finder.taken,
            events=tuple(modes.meetings.events),
            assumptions=modes.meetings.assumptions,
            habits=habits,
            loaders=self._loaders(),
            fake=tuple(self.around.found),
        )
        return replace(step, program=program, batch=batch * passes)

    def _loaders(self) -> tuple[Loader, ...]:
        with _disable_current_modes():
            return self.around.loaders.of_step()


def _named(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A model's inputs by the names of its arguments."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return kwargs or args
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        flat.update(value if isinstance(value, dict) and name not in ("args",) else {name: value})
    return flat
