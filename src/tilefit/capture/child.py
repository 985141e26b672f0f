"""Capture in a process of its own: a model file that hangs or aborts takes nothing with it.

The child (:mod:`tilefit.capture.worker`) reads its options as JSON from standard input and writes each step,
after a line about what it depends on, or its error, as JSON to a file in the folder it is given. What the
model's code prints goes to standard error.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tilefit.capture.cache import Witness, recall, remember
from tilefit.capture.naming import has_source, require_readable
from tilefit.capture.ranks import Ranks
from tilefit.capture.results import read, written
from tilefit.capture.worker import Worker, begin, kept, leave, say, working, write
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step
from tilefit.options import AnyOptions, ProgramOptions, TargetOptions


def capture_target(target: str, options: TargetOptions) -> Step:
    """Load and capture a target in this process, with the texts of files that its options give."""
    from tilefit.capture.copies import in_type
    from tilefit.capture.failures import CHECK_INPUTS
    from tilefit.capture.overlay import overlaid
    from tilefit.capture.run import capture
    from tilefit.capture.semantic import SHORTER_INPUTS
    from tilefit.capture.sites import noting_makers
    from tilefit.capture.targets import load

    # Without others, what a target has imported is not forgotten.
    with overlaid(options.sources) if options.sources else nullcontext(), noting_makers():
        with _uncollected():
            loaded = load(target, options)
        if options.weights:
            loaded = replace(loaded, **in_type(loaded.model, loaded.inputs, options.weights))
        try:
            return capture(
                loaded.model,
                loaded.inputs,
                options=options,
                loss=loaded.loss,
                name=loaded.name,
                notes=loaded.notes,
            )
        except CaptureError as error:
            known = {CHECK_INPUTS: loaded.hint, SHORTER_INPUTS: loaded.shorter}
            error.hint = known.get(error.hint) or error.hint
            raise


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within the block no garbage is collected, and what it made is not searched for any later.

    Importing libraries makes hundreds of thousands of objects and hardly any garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def capture_in_child(
    target: str,
    options: AnyOptions,
    timeout_s: float = 600.0,
    *,
    fresh: bool = False,
    gpu: str = "",
    told: Callable[[str], None] = lambda text: None,
) -> Step:
    """Capture a target in a child process: arguments as of :func:`captures_in_child`.

    Raises:
        CaptureError: the child ran out of time or died.
        TilefitError: whatever the capture raised.
    """
    (captured,) = captures_in_child(target, [options], timeout_s, fresh=fresh, gpu=gpu, told=told)
    return _step(captured)


def captures_in_child(
    target: str,
    options: Sequence[AnyOptions],
    timeout_s: float = 600.0,
    *,
    fresh: bool = False,
    gpu: str = "",
    told: Callable[[str], None] = lambda text: None,
) -> Generator[Step | TilefitError]:
    """Capture a target several times, one after the other: a model in one child process, a program in one
    each time.

    Args:
        target: What to capture.
        options: How, each time; of a program which, and with which arguments.
        timeout_s: How long one capture may take, the first with the start of the child.
        fresh: Capture those again that were captured before and are unchanged; programs always are.
        gpu: Name of the GPU that a program is told that it runs on.
        told: Gets what a program is at.

    Returns:
        For each of the options, in order and as soon as it is there, the step or what the capture raised.

    Raises:
        CaptureError: the child ran out of time or died.
        TilefitError: the target is none.
    """
    if any(isinstance(each, ProgramOptions) for each in options):
        for each in options:
            assert isinstance(each, ProgramOptions)
            try:
                yield capture_program_in_child(each, gpu, timeout_s, told)
            except TilefitError as error:
                yield error
        return
    models = [each for each in options if isinstance(each, TargetOptions)]
    require_readable(target)
    known = {} if fresh else {each: step for each, o in enumerate(models) if (step := recall(target, o))}
    missing = [each for index, each in enumerate(models) if index not in known]
    with closing(_captures(target, missing, timeout_s)) as captured:
        for index in range(len(models)):
            yield known.get(index) or next(captured)


def _captures(
    target: str, options: Sequence[TargetOptions], timeout_s: float
) -> Generator[Step | TilefitError]:
    if not options:
        return
    request = {"target": target, "options": [asdict(each) for each in options], "path": sys.path}
    with working(request) as worker:
        for index, each in enumerate(options):
            witness, _, text = worker.read(_result(index), target, timeout_s).rpartition("\n")
            result = read(text)
            if isinstance(result, Step) and not each.sources:  # those are tried for a moment, and never again
                remember(target, each, witness, text)
            yield result


def capture_program_in_child(
    program: ProgramOptions,
    gpu: str,
    timeout_s: float = 600.0,
    told: Callable[[str], None] = lambda text: None,
) -> Step:
    """Run a program under an emulated GPU in a child process, and capture the step that it makes.

    Ranks whose messages it waits for run in child processes beside it.

    Args:
        program: The program, and which of its steps.
        gpu: Name of the GPU that it is told that it runs on.
        timeout_s: How long that may take.
        told: Gets what the program is at.

    Raises:
        CaptureError: the child ran out of time or died, or no step can be captured.
        TilefitError: the program failed.
    """
    with ExitStack() as stack:
        mail = stack.enter_context(TemporaryDirectory(prefix="tilefit-", ignore_cleanup_errors=True))
        own = program.rank if program.ranks else int(os.environ.get("RANK", 0))

        def start(rank: int) -> Worker:
            request = {"program": asdict(program), "gpu": gpu, "path": sys.path, "rank": rank, "mail": mail}
            return stack.enter_context(working(request, told if rank == own else lambda text: None))

        ranks = Ranks(own, Path(mail), start, _result(0))

        def step_of(worker: Worker) -> Step:
            text = worker.read(_result(0), program.program, timeout_s, ranks.look, ranks.lines)
            ranks.look()  # who is asked for, or has failed, since
            return _step(read(text))

        step = step_of(start(own))
        ranks.own_ended()
        # Who is read may ask for others.
        others: dict[int, Step] = {}
        while missing := [rank for rank in ranks.workers if rank not in others]:
            others[missing[0]] = step_of(ranks.workers[missing[0]])
    others[own] = step
    return replace(step, ranks=tuple(others[rank] for rank in sorted(others))) if len(others) > 1 else step


def _step(result: Step | TilefitError) -> Step:
    if isinstance(result, TilefitError):
        raise result
    return result


def _result(index: int) -> str:
    return f"{index}.json"


def main() -> None:
    """The child's side."""
    witness = Witness()
    folder, request = begin()
    sys.path[:] = [*request["path"], *(p for p in sys.path if p not in request["path"])]
    # Before the user's folders come first on the path, where a file may be called like one of its modules.
    import_module("tilefit.capture.targets")
    if "program" in request:
        _run_program(request, folder)
    for index, options in enumerate(request["options"]):
        try:
            wanted = TargetOptions(**{**options, "input": tuple(options["input"])})
            step = written(_captured(request["target"], wanted))
            text = f"{witness.to_json()}\n{step}"
        except TilefitError as error:
            text = written(error)
        write(folder, _result(index), text)
    leave()


def _captured(target: str, options: TargetOptions) -> Step:
    """A target's step; of a function that shapes alone do not do for, on the emulated GPU."""
    from tilefit.capture.failures import needs_device

    try:
        return capture_target(target, options)
    except TilefitError as error:
        if options.on_cpu or not has_source(target) or not needs_device(error):
            raise
        from tilefit.capture.overlay import overlaid
        from tilefit.capture.program.function import capture_function

        with overlaid(options.sources):
            step = capture_function(target, options)
        if step is None:
            raise
        return step


def _run_program(request: dict[str, Any], folder: Path) -> NoReturn:
    import torch

    from tilefit import gpus
    from tilefit.capture.program.confined import confine
    from tilefit.capture.program.run import capture_program
    from tilefit.emulation.mail import Mail, ranks_of_machine

    mail = Mail(Path(request["mail"]), request["rank"])
    # Where others are at work, threads wait for each other longer than small operations take.
    torch.set_num_threads(1)
    tempfile.gettempdir()  # finds the user's by writing there, which no one can below
    # What Python's own functions write is redirected; what else writes fails.
    confine((folder, request["mail"], "/dev", "/proc"))
    started = os.getpid()

    def done(result: Step | TilefitError) -> NoReturn:
        # A program may have forked. Whichever process has a step has the result; that it has none, only the
        # first one knows, and only if no other was before it.
        first = os.getpid() == started and not (folder / _result(0)).exists()
        if isinstance(result, Step) or first:
            write(folder, _result(0), written(result))
        leave()

    def keep(step: Step) -> None:
        write(folder, kept(_result(0)), written(step))

    options = ProgramOptions(**{**request["program"], "arguments": tuple(request["program"]["arguments"])})
    if not options.ranks and request["rank"] != int(os.environ.get("RANK", 0)):
        world = int(os.environ["WORLD_SIZE"])
        options = replace(options, ranks=world, nodes=world // ranks_of_machine(world))
    if options.ranks:
        options = replace(options, rank=request["rank"])
    capture_program(options, gpus.get(request["gpu"]), folder, done, keep, partial(say, folder), mail)
