"""Capture in a process of its own: a model file that hangs or aborts takes nothing with it.

The child reads its options as JSON from standard input and writes each step, after a line about what it
depends on, or its error, as JSON to a file in the folder it is given. What the model's code prints goes to
standard error.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tilefit import errors
from tilefit.capture.cache import Witness, recall, remember
from tilefit.capture.naming import has_source, require_readable
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step
from tilefit.options import ProgramOptions, TargetOptions

_POLL_S = 0.02
#: Where this package is, and what the child runs. Unlike ``-m``, ``-P -c`` does not search the current
#: folder: a file of the user's called like a module of the standard library is not to take its place.
_ROOT = str(Path(__file__).parents[2])
_START = "import sys; sys.path.append(sys.argv[2]); from tilefit.capture.child import main; main()"


def capture_target(target: str, options: TargetOptions) -> Step:
    """Load and capture a target in this process."""
    if not options.sources:
        return _capture_target(target, options)
    from tilefit.capture.overlay import overlaid

    with overlaid(options.sources):
        return _capture_target(target, options)


def _capture_target(target: str, options: TargetOptions) -> Step:
    from tilefit.capture.failures import CHECK_INPUTS
    from tilefit.capture.run import capture
    from tilefit.capture.semantic import SHORTER_INPUTS
    from tilefit.capture.targets import load

    with _uncollected():
        loaded = load(target, options)
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
    target: str, options: TargetOptions, timeout_s: float = 600.0, *, fresh: bool = False
) -> Step:
    """Load and capture a target in a child process; ``fresh``: although it is known.

    Raises:
        CaptureError: the child ran out of time or died.
        TilefitError: whatever the capture raised.
    """
    (captured,) = captures_in_child(target, [options], timeout_s, fresh=fresh)
    if isinstance(captured, TilefitError):
        raise captured
    return captured


def captures_in_child(
    target: str, options: Sequence[TargetOptions], timeout_s: float = 600.0, *, fresh: bool = False
) -> Generator[Step | TilefitError]:
    """Load and capture a target several times, one after the other, in one child process.

    Args:
        target: What to capture.
        options: How, each time.
        timeout_s: How long one capture may take, the first with the start of the child.
        fresh: Capture those again that were captured before and are unchanged.

    Returns:
        For each of the options, in order and as soon as it is there, the step or what the capture raised.

    Raises:
        CaptureError: the child ran out of time or died.
        TilefitError: the target is none.
    """
    require_readable(target)
    known = {} if fresh else {each: step for each, o in enumerate(options) if (step := recall(target, o))}
    missing = [each for index, each in enumerate(options) if index not in known]
    with closing(_captures(target, missing, timeout_s) if missing else _nothing()) as captured:
        for index in range(len(options)):
            yield known.get(index) or next(captured)


def _nothing() -> Generator[Step | TilefitError]:
    yield from ()


def _captures(
    target: str, options: Sequence[TargetOptions], timeout_s: float
) -> Generator[Step | TilefitError]:
    request = {"target": target, "options": [asdict(each) for each in options]}
    with _child(request) as (process, folder):
        for index, each in enumerate(options):
            text = _read(process, _result(folder, index), target, timeout_s)
            if text.startswith('{"error"'):
                yield _error(**json.loads(text))
                continue
            witness, _, text = text.partition("\n")
            if not each.sources:  # tried for a moment, and never again
                remember(target, each, witness, text)
            yield Step.from_json(text)


@contextmanager
def _child(request: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A child process at work on a request, and the folder that it writes its results to."""
    with tempfile.TemporaryDirectory(prefix="tilefit-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, folder, _ROOT],
            stdin=subprocess.PIPE,
            stdout=2,  # what the model prints must not mix with the report
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the child
            env={**os.environ},  # not what C libraries have put beside it
        )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:  # a child that died is noticed below
                process.stdin.write(json.dumps({**request, "path": sys.path}))
            yield process, folder
        finally:
            process.kill()
            process.wait()


def capture_program_in_child(program: ProgramOptions, gpu: str, timeout_s: float = 600.0) -> Step:
    """Run a program under an emulated GPU in a child process, and capture the step that it makes.

    Args:
        program: The program, and which of its steps.
        gpu: Name of the GPU that it is told that it runs on.
        timeout_s: How long that may take.

    Raises:
        CaptureError: the child ran out of time or died, or no step can be captured.
        TilefitError: the program failed.
    """
    with _child({"program": asdict(program), "gpu": gpu}) as (process, folder):
        text = _read(process, _result(folder, 0), program.program, timeout_s)
    if text.startswith('{"error"'):
        raise _error(**json.loads(text))
    return Step.from_json(text)


def _result(folder: str, index: int) -> Path:
    return Path(folder) / f"{index}.json"


def _read(process: subprocess.Popen[str], result: Path, target: str, timeout_s: float) -> str:
    """What the child writes to a file, once it is there."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and not result.exists():
        if time.monotonic() > deadline:
            raise CaptureError(
                f"{target} did not finish within {timeout_s:.0f} s",
                hint="Give it longer with --timeout, or a smaller input.",
            )
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    if not result.exists():
        killed = process.returncode == -signal.SIGKILL
        raise CaptureError(
            f"the process that ran {target} {_ending(process.returncode)}",
            hint="Most likely memory ran out: with --on-cpu weights and activations are real. Take a smaller "
            "batch or model, or leave --on-cpu out."
            if killed
            else "Its last words are above; run the model alone to see more.",
        )
    return result.read_text()


def _error(error: str, what: str, where: str, hint: str) -> TilefitError:
    kind: type[TilefitError] = getattr(errors, error)
    return kind(what, where=where, hint=hint)


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode} before it had a result"


def main() -> None:
    """The child's side."""
    folder = sys.argv[1]  # a program gets arguments of its own
    witness = Witness()
    request = json.load(sys.stdin)
    sys.path[:] = [*request["path"], *(p for p in sys.path if p not in request["path"])]
    # Before the user's folders come first on the path, for the same reason.
    import_module("tilefit.capture.targets")
    sys.stdin = open(os.devnull)  # noqa: SIM115 - a model that asks for input must not wait for it
    if "program" in request:
        _run_program(request, folder)
    for index, options in enumerate(request["options"]):
        try:
            wanted = TargetOptions(**{**options, "input": tuple(options["input"])})
            step = _captured(request["target"], wanted).to_json()
            text = f"{witness.to_json()}\n{step}"
        except TilefitError as error:
            text = _told(error)
        _write(folder, index, text)
    _leave()


def _captured(target: str, options: TargetOptions) -> Step:
    """A target's step; of a function that shapes alone do not do for, on the emulated GPU."""
    from tilefit.capture.failures import needs_device

    try:
        return capture_target(target, options)
    except TilefitError as error:
        if options.on_cpu or not has_source(target) or not needs_device(error):
            raise
        from tilefit.capture.program.function import capture_function

        step = capture_function(target, options)
        if step is None:
            raise
        return step


def _run_program(request: dict[str, Any], folder: str) -> NoReturn:
    from tilefit import gpus
    from tilefit.capture.program.run import capture_program

    def done(step: Step) -> NoReturn:
        _write(folder, 0, step.to_json())
        _leave()

    options = ProgramOptions(**{**request["program"], "arguments": tuple(request["program"]["arguments"])})
    try:
        capture_program(options, gpus.get(request["gpu"]), done)
    except TilefitError as error:
        _write(folder, 0, _told(error))
    _leave()


def _told(error: TilefitError) -> str:
    return json.dumps(
        {"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}
    )


def _write(folder: str, index: int, text: str) -> None:
    result = _result(folder, index)
    partial = result.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(result)


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking PyTorch down module by module would take half a second
