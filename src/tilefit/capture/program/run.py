"""Runs a program until its step is captured."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch

from tilefit.capture.program.finding import StepFinder
from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.program.window import Window
from tilefit.capture.script import failure, run_as_main
from tilefit.capture.sites import user_line
from tilefit.capture.torchvision_import import tolerated
from tilefit.errors import CaptureError, TilefitError
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.options import ProgramOptions


def capture_program(options: ProgramOptions, gpu: Gpu, done: Callable[[Step], NoReturn]) -> NoReturn:
    """Run a program in this process, which ends with it, and capture the step that it makes.

    Args:
        options: The program, its arguments, and which of its steps.
        gpu: What it is told that it runs on.
        done: Takes the step, and ends the process: nothing that the program would do then is done.

    Raises:
        TilefitError: it failed, or ended before its step was complete.
    """
    modes = ProgramModes(gpu)
    window = Window(modes)

    def end() -> NoReturn:
        with torch._C.DisableTorchFunction():
            command = " ".join([options.program, *options.arguments])
            done(window.step(options.program, command, finder.stepped, finder.taken))

    finder = StepFinder(options.skip, options.steps, window.begin, end)
    with ExitStack() as stack:
        stack.enter_context(tolerated())
        stack.enter_context(modes.running())
        stack.enter_context(finder.watching())
        error = _run(options)
    raise error or _no_step(finder, options)


def _run(options: ProgramOptions) -> TilefitError | None:
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
