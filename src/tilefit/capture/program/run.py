"""Runs a program until its step is captured."""

from __future__ import annotations

import gc
import linecache
import os
import re
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilefit.capture.overlay import overlaid
from tilefit.capture.packages import is_installed
from tilefit.capture.program.contained import Surroundings, contained
from tilefit.capture.program.distributed import one_rank
from tilefit.capture.program.extensions import replaced
from tilefit.capture.program.finding import Listener, StepFinder
from tilefit.capture.program.idle import when_idle
from tilefit.capture.program.invariants import ON_CPU
from tilefit.capture.program.late import changed
from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.program.window import Window
from tilefit.capture.script import failure, run_as_main
from tilefit.capture.sites import noting_makers, user_line
from tilefit.emulation import nvml
from tilefit.emulation.mail import Mail
from tilefit.errors import CaptureError, TargetError, TilefitError
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.options import ProgramOptions
from tilefit.units import counted

#: Takes the step, or what went wrong, and ends the process: nothing that the program would do then is done.
Done = Callable[[Step | TilefitError], NoReturn]
_WENT_ON = "Behind the step the program went on until its time was up, and trained nothing."
_STOPPED = "Some seconds behind the step the program was stopped; it had trained nothing until then."
_WAITED = "Behind the step the program waited, as for requests, and was stopped."
_CUT = "Loops over loaders that trained nothing were ended after some seconds, to see what follows."
#: Seconds for which a program that calls its model again and again may still begin to train: some evaluate
#: first. A choice.
_PATIENCE_S = 5.0
#: Seconds more where its step may turn out to be larger. A choice.
_WIDENING_S = 15.0
_MAKES_GRAPHS = re.compile(r"\b(CUDAGraph|cuda\.graph|make_graphed_callables)\(")


def capture_program(
    options: ProgramOptions,
    gpu: Gpu,
    folder: Path,
    done: Done,
    keep: Callable[[Step], None],
    told: Callable[[str], None],
    mail: Mail | None = None,
) -> NoReturn:
    """Run a program in this process, which ends with it, and capture the step that it makes.

    Args:
        options: The program, its arguments, and which of its steps.
        gpu: What it is told that it runs on.
        folder: Where the files go that it writes.
        done: Takes what came of it.
        keep: Takes a step that the program may yet train behind, for the case that it does not end.
        told: Gets what it is at.
        mail: By which other ranks of it answer.
    """
    os.environ |= options.environment
    gc.freeze()  # what is imported by now is no garbage of the program: no need to search it before each step
    try:
        with on_emulated_gpu(gpu, folder, fake=options.fake_data, mail=mail) as (around, modes):
            capture = _Capture(modes, options, around, done, keep, told)
            with (
                capture.finder.watching(),
                capture.window.watching(capture.finder.called),
                overlaid(options.sources),
            ):
                error = _run(options, around)
            result = capture.so_far(error) or error or _no_step(capture.finder, options)
    except TilefitError as refused:
        result = refused
    done(result)


@contextmanager
def on_emulated_gpu(
    gpu: Gpu, folder: Path, *, fake: bool = False, mail: Mail | None = None
) -> Iterator[tuple[Surroundings, ProgramModes]]:
    """Within the block this process has a GPU, and from then on; what it writes to files is not kept.

    Args:
        gpu: What it is told that it has.
        folder: Where its files go.
        fake: Random data take the place of data that are missing.
        mail: By which other ranks of the program answer.
    """
    nvml.put_command(folder, gpu)
    with contained(folder, fake=fake) as around:
        modes = ProgramModes(gpu, mail)
        modes.meetings.is_loading = lambda: around.loaders.drawing
        tools = changed({"pynvml": lambda module: nvml.answer(module, gpu, modes.meetings)})
        with one_rank(modes.recorder), noting_makers(), tools, replaced(), modes.running():
            yield around, modes


def _run(options: ProgramOptions, around: Surroundings) -> TilefitError | None:
    """Run the program as Python does; returns what went wrong in it."""
    script = Path(options.program)
    sys.argv = [options.program, *options.command]
    sys.path.insert(0, os.getcwd() if options.is_module else str(script.resolve().parent))
    try:
        if options.is_module:
            _require_module(options.program)
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            run_as_main(script)
    except TilefitError as error:
        error.where = error.where or user_line(error)
        return error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's program may raise
        if explained := around.explained(error) or _unknown_operator(error):
            return explained
        if not isinstance(error, SystemExit):
            _print_from_its_first_line(error)
        hint = "The program failed on the emulated GPU; see above."
        if around.sources.found:
            hint += f" It may expect other data than were made up: {'; '.join(around.sources.found)}."
        return failure(error, options.program, hint)
    return None


def _unknown_operator(error: BaseException) -> TilefitError | None:
    """What to tell of an operator that PyTorch does not know the results' shapes of."""
    name, _, said = str(error).partition(": ")
    if not (isinstance(error, NotImplementedError) and "fake impl" in said):
        return None
    return CaptureError(
        f"nothing says what shape the results of {name} have",
        where=user_line(error),
        hint="An operator of your own says so by torch.library.register_fake; those of "
        "torch.ao.quantization do not run on CUDA.",
    )


def _require_module(name: str) -> None:
    try:
        found = find_spec(name)
    except ModuleNotFoundError as error:  # of a package that it would be in
        found, name = None, error.name or name
    if found is None:
        raise TargetError(
            f"there is no module {name}",
            hint="It is looked for in this folder and in what is installed; for one in src: PYTHONPATH=src.",
        )


def _print_from_its_first_line(error: Exception) -> None:
    """What Python prints, without the frames of who started the program."""
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame.filename for frame in shown.stack]
    started = max((i for i, name in enumerate(frames) if name == f"<frozen {runpy.__name__}>"), default=-1)
    del shown.stack[: started + 1]
    print("".join(shown.format()), end="", file=sys.stderr)


def _no_step(finder: StepFinder, options: ProgramOptions) -> TilefitError:
    wanted = options.skip + options.steps
    earlier = finder.taken > options.steps  # the first step is none: it makes the optimizer's state
    if finder.taken:
        return CaptureError(
            f"the program ended after {finder.taken} of the {wanted} optimizer steps that are needed",
            where=options.program,
            hint="Give it more data or epochs by its own arguments"
            + (f", or look at an earlier step: --skip {finder.taken - options.steps}." if earlier else "."),
        )
    if finder.forwards:
        return CaptureError(
            "the program ended without a step: it made an optimizer, called its model "
            f"{counted(finder.forwards, 'time')} as if to train it, and no backward pass followed",
            where=options.program,
            hint="What only infers does so after model.eval(), or under torch.no_grad().",
        )
    return CaptureError(
        "the program ended without a step: no optimizer stepped, no backward pass ran, no model was called "
        "on the GPU",
        where=options.program,
        hint=f"{ON_CPU} Give the arguments with which it trains or infers, after --; with --ranks N it finds "
        "N GPUs. What calls no nn.Module can be checked as a function that returns a step: tilefit check "
        "file.py:function.",
    )


class _Capture(Listener):
    """What is noted while the step runs, and made of it at its end."""

    def __init__(
        self,
        modes: ProgramModes,
        options: ProgramOptions,
        around: Surroundings,
        done: Done,
        keep: Callable[[Step], None],
        told: Callable[[str], None],
    ) -> None:
        self.window, self.options, self.around, self._modes = Window(modes), options, around, modes
        self.done, self.keep, self.told = done, keep, told
        self.finder = StepFinder(options.skip, options.steps, self)
        self.lines = modes.sites.source_stack  # type: ignore[method-assign]
        modes.meetings.on_capture, modes.meetings.on_captured = self.finder.capturing, self.finder.captured
        #: Of what trains nothing, the first call of its model.
        self._first: Step | TilefitError | None = None
        #: The step of a program that has trained nothing yet, or warms up, and when to stop waiting for more.
        self._so_far: Step | TilefitError | None = None
        self._until_s = 0.0
        #: Whether a loop over a loader was ended early, to see what follows.
        self._cut = False

    def begins(self) -> None:
        self.told("its step")
        self.around.loaders.stepped()
        self.window.begin()

    def ends(self) -> None:
        # Within the program, which may catch whatever is raised.
        result = self._result()
        if self.finder.is_settled:
            self.done(result)
        was_known = self._so_far is not None
        self._so_far, self._until_s = result, time.monotonic() + _PATIENCE_S
        if isinstance(result, Step):
            note = (_WENT_ON,) if self.finder.infers else ()
            self.keep(replace(result, notes=(*result.notes, *note)))
        if not was_known:
            when_idle(self._waits)

    def _waits(self) -> None:
        """The program does nothing any more."""
        if self._so_far is not None and self.finder.infers and not self.finder.is_to_train:
            self.done(_noted(self._so_far, _WAITED))

    def first_ended(self) -> None:
        self._first = self._result()
        self.window.begin()

    def goes_on(self) -> None:
        late_s = time.monotonic() - self._until_s
        if late_s < 0 or (self.finder.infers and self.finder.may_widen and late_s < _WIDENING_S):
            return
        assert self._so_far is not None
        if not self.finder.infers:
            self.done(self._so_far)
        is_to_train = self.finder.is_to_train
        if (is_to_train or not self._cut) and self.around.loaders.end_epoch():
            self._cut, self._until_s = True, time.monotonic() + _PATIENCE_S
        elif not is_to_train:
            self.done(_noted(self._so_far, _STOPPED))

    def evaluates(self) -> None:
        """Between two steps before the one that is looked at, a loop that goes on for long is ended."""
        begun_s = self.finder.stepped_s
        if self._modes.recorder.muted and begun_s and time.monotonic() - begun_s > _PATIENCE_S:
            self._cut |= self.around.loaders.end_epoch(begun_s)

    def is_aside(self) -> bool:
        return self._modes.meetings.is_aside

    def may_capture(self) -> bool:
        """One of the program's own files makes CUDA graphs."""
        files = {str(getattr(module, "__file__", "") or "") for module in [*sys.modules.values()]}
        own = (each for each in files if each.endswith(".py") and not is_installed(each))
        return any(_MAKES_GRAPHS.search("".join(linecache.getlines(each))) for each in own)

    def so_far(self, error: TilefitError | None) -> Step | TilefitError | None:
        """What came of a program that has ended, with this error, and has trained nothing, or only as if to
        warm up; None of others."""
        if not self.finder.infers:
            return error or self._so_far
        if not self.finder.taken:
            return None
        if self._so_far is None or (error and self.finder.was_to_train and not self._cut):
            return error or self._result()
        notes = [_CUT] if self._cut else []
        if error:
            notes.append(f"Behind the step the program failed: {error.what} ({error.where}).")
        return _noted(self._so_far, *notes)

    def _result(self) -> Step | TilefitError:
        with torch._C.DisableTorchFunction():
            try:
                return self._step()
            except TilefitError as error:
                return error
            except Exception as error:  # noqa: BLE001 - told as it would be outside of the program
                traceback.print_exc()
                return CaptureError(f"{type(error).__name__}: {error}", hint="This is a bug in tilefit.")

    def _step(self) -> Step:
        name = self.options.program
        command = " ".join([name, *self.options.command])
        step = self.window.step(name, command, self.finder.stepped, self.finder.taken)
        with _disable_current_modes():
            loaders = self.around.loaders.of_step()
        program = replace(
            step.program,
            loaders=loaders,
            fake=tuple(self.around.sources.found),
            network=self.options.network,
        )
        first = self._first if self.finder.infers and self.finder.began_with_it else None
        if isinstance(first, Step) and first.inputs != step.inputs:
            step = replace(step, prompt=first)
        notes = [*self.finder.notes, *([_CUT] if self._cut else [])]
        return replace(step, program=program, notes=(*step.notes, *notes))


def _noted(step: Step | TilefitError, *notes: str) -> Step | TilefitError:
    return replace(step, notes=(*step.notes, *notes)) if isinstance(step, Step) else step
