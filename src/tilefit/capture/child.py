"""Capture in a process of its own: a model file that hangs or aborts takes nothing with it.

The child reads its options as JSON from standard input and writes each step, or its error, as JSON to a file
in the folder it is given. What the model's code prints goes to standard error.
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
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

from tilefit import errors
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step

_POLL_S = 0.02
#: Where this package is, and what the child runs. Unlike ``-m``, ``-P -c`` does not search the current
#: folder: a file of the user's called like a module of the standard library is not to take its place.
_ROOT = str(Path(__file__).parents[2])
_START = "import sys; sys.path.append(sys.argv[2]); from tilefit.capture.child import main; main()"


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How to capture a target; the fields are those of :func:`tilefit.capture.capture` and the inputs', and
    ``sources``: texts of files, by real path, to be read instead of what the files say."""

    inputs: tuple[str, ...] = field(default=())
    batch: int | None = None
    seq: int | None = None
    image_size: int | None = None
    train: bool = True
    amp: str = ""
    tf32: bool | None = None
    optimizer: str = "adamw"
    fused_optimizer: bool = False
    channels_last: bool = False
    compiled: bool = False
    on_cpu: bool = False
    arguments: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    varied: str = ""


def capture_target(target: str, options: CaptureOptions) -> Step:
    """Load and capture a target in this process."""
    if not options.sources:
        return _capture_target(target, options)
    from tilefit.capture.overlay import overlaid

    with overlaid(options.sources):
        return _capture_target(target, options)


def _capture_target(target: str, options: CaptureOptions) -> Step:
    from tilefit.capture.failures import CHECK_INPUTS
    from tilefit.capture.run import capture
    from tilefit.capture.semantic import SHORTER_INPUTS
    from tilefit.capture.targets import InputOptions, load

    device = "cpu" if options.on_cpu else "meta"
    with _uncollected():
        sizes = (options.batch, options.seq, options.image_size)
        inputs = InputOptions(
            options.inputs, *sizes, options.train, device, options.arguments, options.varied
        )
        loaded = load(target, inputs)
    try:
        return capture(
            loaded.model,
            loaded.inputs,
            train=options.train,
            amp=options.amp,
            tf32=options.tf32,
            optimizer=options.optimizer,
            fused_optimizer=options.fused_optimizer,
            channels_last=options.channels_last,
            compiled=options.compiled,
            on_cpu=options.on_cpu,
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


def capture_in_child(target: str, options: CaptureOptions, timeout_s: float = 600.0) -> Step:
    """Load and capture a target in a child process.

    Raises:
        CaptureError: the child ran out of time or died.
        TilefitError: whatever the capture raised.
    """
    (captured,) = captures_in_child(target, [options], timeout_s)
    if isinstance(captured, TilefitError):
        raise captured
    return captured


def captures_in_child(
    target: str, options: Sequence[CaptureOptions], timeout_s: float = 600.0
) -> Generator[Step | TilefitError]:
    """Load and capture a target several times, one after the other, in one child process.

    Args:
        target: What to capture.
        options: How, each time.
        timeout_s: How long one capture may take, the first with the start of the child.

    Returns:
        For each of the options, in order and as soon as it is there, the step or what the capture raised.

    Raises:
        CaptureError: the child ran out of time or died.
    """
    with tempfile.TemporaryDirectory(prefix="tilefit-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, folder, _ROOT],
            stdin=subprocess.PIPE,
            stdout=2,  # what the model prints must not mix with the report
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the child
        )
        request = {"target": target, "options": [asdict(each) for each in options], "path": sys.path}
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:  # a child that died is noticed below
                process.stdin.write(json.dumps(request))
            for index in range(len(options)):
                yield _read(process, _result(folder, index), target, timeout_s)
        finally:
            process.kill()
            process.wait()


def _result(folder: str, index: int) -> Path:
    return Path(folder) / f"{index}.json"


def _read(process: subprocess.Popen[str], result: Path, target: str, timeout_s: float) -> Step | TilefitError:
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
    text = result.read_text()
    if text.startswith('{"error"'):
        error = json.loads(text)
        kind: type[TilefitError] = getattr(errors, error["error"])
        return kind(error["what"], where=error["where"], hint=error["hint"])
    return Step.from_json(text)


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode} before it had a result"


def main() -> None:
    """The child's side."""
    request = json.load(sys.stdin)
    sys.path[:] = [*request["path"], *(p for p in sys.path if p not in request["path"])]
    # Before the user's folders come first on the path, for the same reason.
    import_module("tilefit.capture.targets")
    sys.stdin = open(os.devnull)  # noqa: SIM115 - a model that asks for input must not wait for it
    for index, options in enumerate(request["options"]):
        try:
            wanted = CaptureOptions(**{**options, "inputs": tuple(options["inputs"])})
            text = capture_target(request["target"], wanted).to_json()
        except TilefitError as error:
            text = json.dumps(
                {"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}
            )
        result = _result(sys.argv[1], index)
        partial = result.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking PyTorch down module by module would take half a second
