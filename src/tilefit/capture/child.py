"""Capture in a process of its own: a model file that hangs or aborts takes nothing with it.

The child reads its options as JSON from standard input and writes the step, or the error, as JSON to the
file it is given. What the model's code prints goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tilefit import errors
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How to capture a target; the fields are those of :func:`tilefit.capture.capture` and the inputs'."""

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


def capture_target(target: str, options: CaptureOptions) -> Step:
    """Load and capture a target in this process."""
    from tilefit.capture.run import capture
    from tilefit.capture.targets import InputOptions, load

    device = "cpu" if options.on_cpu else "meta"
    with _uncollected():
        sizes = (options.batch, options.seq, options.image_size)
        loaded = load(target, InputOptions(options.inputs, *sizes, options.train, device))
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
    with tempfile.TemporaryDirectory(prefix="tilefit-") as folder:
        result = Path(folder) / "step.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "tilefit.capture.child", str(result)],
            stdin=subprocess.PIPE,
            stdout=2,  # what the model prints must not mix with the report
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the child
        )
        request = json.dumps({"target": target, "options": asdict(options), "path": sys.path})
        try:
            process.communicate(request, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise CaptureError(
                f"{target} did not finish within {timeout_s:.0f} s",
                hint="Give it longer with --timeout, or a smaller input.",
            ) from None
        except BaseException:
            process.kill()
            process.wait()
            raise
        if not result.exists():
            raise CaptureError(
                f"the process that ran {target} {_ending(process.returncode)}",
                hint="Its last words are above; run the model alone to see more.",
            )
        text = result.read_text()
    if text.startswith('{"error"'):
        error = json.loads(text)
        raise getattr(errors, error["error"])(error["what"], where=error["where"], hint=error["hint"])
    return Step.from_json(text)


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode} before it had a result"


def main() -> None:
    """The child's side."""
    request = json.load(sys.stdin)
    result = Path(sys.argv[1])
    sys.path[:] = [*request["path"], *(p for p in sys.path if p not in request["path"])]
    sys.stdin = open(os.devnull)  # noqa: SIM115 - a model that asks for input must not wait for it
    options = CaptureOptions(**{**request["options"], "inputs": tuple(request["options"]["inputs"])})
    try:
        text = capture_target(request["target"], options).to_json()
    except TilefitError as error:
        text = json.dumps(
            {"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}
        )
    partial = result.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking PyTorch down module by module would take half a second


if __name__ == "__main__":
    main()
