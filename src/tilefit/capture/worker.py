"""A process in which code of the user's runs, whatever that code does: both of its sides.

The worker is the first of its session, so that processes it starts end with it. It lives no longer than who
started it: standard input stays open until then. What it prints goes to standard error, up to a limit.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from tilefit.errors import CaptureError

_POLL_S = 0.02
#: Where this package is, and what the worker runs. Unlike ``-m``, ``-P -c`` does not search the current
#: folder: a file of the user's called like a module of the standard library is not to take its place.
_ROOT = str(Path(__file__).parents[2])
_START = "import sys; sys.path.append(sys.argv[2]); from tilefit.capture.child import main; main()"
#: So much of what it prints is shown; of the rest only the end, where it failed.
_SHOWN_BYTES, _LAST_BYTES = 1 << 16, 1 << 12
_PIECE_BYTES = 1 << 16
#: The worker's files beside its results: where it is, and what it is at.
_STACK, _PROGRESS = "stack", "progress"
#: How often input ends.
_ENDS = 1000
#: Seconds that it gets to say where it is, or for its last words to arrive.
_GRACE_S = 1.0


def start(folder: str, printed: int) -> subprocess.Popen[bytes]:
    """Start the process of a worker, which writes to a folder, and what it prints to a file descriptor."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START, folder, _ROOT],
        stdin=subprocess.PIPE,
        stdout=printed,  # what the user's code prints must not mix with the report
        stderr=printed,
        start_new_session=True,  # Ctrl-C is for the parent, which ends the worker
        env={**os.environ},  # not what C libraries have put beside it
    )


def kept(name: str) -> str:
    """The file of what there is of another so far."""
    return f"{name}.kept"


class Worker:
    """The side of who started it."""

    def __init__(self, folder: str, told: Callable[[str], None]) -> None:
        self.folder = Path(folder)
        self._told = told
        self._heard = ""
        reading, writing = os.pipe()
        self._process = start(folder, writing)
        os.close(writing)
        self._words = _Words(reading)

    def ask(self, request: dict[str, Any]) -> None:
        """Send it its request."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a worker that died is noticed when its result is read
            self._process.stdin.write(f"{json.dumps(request)}\n".encode())
            self._process.stdin.flush()

    def read(
        self,
        name: str,
        what: str,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        others: Callable[[], str] = lambda: "",
    ) -> str:
        """A file of its, once it is there; when the time is up, what it has kept of it so far.

        Args:
            name: The file's.
            what: What the worker does, for errors.
            timeout_s: How long it may take.
            meanwhile: Called again and again until then.
            others: Says what others are at, where it took longer.

        Raises:
            CaptureError: it took longer, or the worker died.
        """
        deadline = time.monotonic() + timeout_s
        while (text := self.found(name, what)) is None:
            if time.monotonic() > deadline:
                if (so_far := self.folder / kept(name)).exists():
                    return so_far.read_text()
                raise CaptureError(
                    f"{what} did not finish within {timeout_s:.0f} s{others()}",
                    where=self.line(asks=True),
                    hint="Give it longer with --timeout, or a smaller input.",
                )
            self._hear()
            meanwhile()
            time.sleep(_POLL_S)
        return text

    def found(self, name: str, what: str) -> str | None:
        """A file of its, if it is there already.

        Raises:
            CaptureError: the worker died without it.
        """
        status, result = self._status(), self.folder / name
        if result.exists():
            return result.read_text()
        if status is None:
            return None
        self._words.end()
        raise self._died(status, what)

    def end(self) -> None:
        """End it and whatever it has started."""
        # Not by Popen's methods: one that is interrupted may leave a lock behind, for which the next waits.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._process.pid, 0)
        self._process.returncode = -signal.SIGKILL  # nobody is to wait for it any more
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._words.end()

    def _status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def _hear(self) -> None:
        with suppress(FileNotFoundError):
            said = (self.folder / _PROGRESS).read_text()
            if said and said != self._heard:
                self._told(said)
            self._heard = said

    def line(self, *, asks: bool = False) -> str:
        """``file:line`` of the user's code that it is or was at; empty if it is not known."""
        stack = self.folder / _STACK
        if asks:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)
            end = time.monotonic() + _GRACE_S
            while time.monotonic() < end and not (stack.exists() and stack.stat().st_size):
                time.sleep(_POLL_S)
            time.sleep(_POLL_S)  # for the rest of it
        return _line_in(stack.read_text()) if stack.exists() else ""

    def _died(self, status: int, what: str) -> CaptureError:
        ending = f"exited with status {status} before it had a result"
        if status < 0:
            ending = f"was ended by {signal.Signals(-status).name}"
        return CaptureError(
            f"the process that ran {what} {ending}",
            where=self.line(),
            hint="Most likely memory ran out: with --on-cpu weights and activations are real. Take a smaller "
            "batch or model, or leave --on-cpu out."
            if status == -signal.SIGKILL
            else "Its last words are above; run the model alone to see more.",
        )


class _Words:
    """Passes on what is printed, up to a limit."""

    def __init__(self, reading: int) -> None:
        self._reading = reading
        self._last: deque[bytes] = deque(maxlen=2)
        self._passed = 0
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for what is still on its way, and show the end of what was left out."""
        self._thread.join(_GRACE_S)
        if self._last:
            _print(b"\n[...]\n" + b"".join(self._last)[-_LAST_BYTES:])
            self._last.clear()

    def _pass_on(self) -> None:
        with suppress(OSError):
            while piece := os.read(self._reading, _PIECE_BYTES):
                room = max(_SHOWN_BYTES - self._passed, 0)
                self._passed += len(piece)
                _print(piece[:room])
                if len(piece) > room:
                    self._last.append(piece[room:])
        os.close(self._reading)


def _print(data: bytes) -> None:
    with suppress(OSError):  # nobody reads
        while data:
            data = data[os.write(2, data) :]


def _line_in(stack: str) -> str:
    """The innermost line of a file of the user's in what :mod:`faulthandler` has written."""
    ours = (os.path.dirname(os.__file__) + os.sep, os.path.join(_ROOT, "tilefit") + os.sep)
    _, _, current = stack.rpartition("Current thread")
    for line in current.splitlines():
        before, quote, rest = line.strip().partition('"')
        file, _, place = rest.partition('", line ')
        if before == "File " and quote and "-packages" not in file and not file.startswith((*ours, "<")):
            return f"{os.path.relpath(file) if os.path.isabs(file) else file}:{place.split()[0]}"
    return ""


@contextmanager
def working(request: dict[str, Any], told: Callable[[str], None] = lambda text: None) -> Iterator[Worker]:
    """Within the block a worker is at a request.

    Args:
        request: As JSON can say it.
        told: Gets what the worker says that it is at, while a result is waited for.
    """
    with tempfile.TemporaryDirectory(prefix="tilefit-", ignore_cleanup_errors=True) as folder:
        worker = Worker(folder, told)
        try:
            worker.ask(request)
            yield worker
        finally:
            worker.end()


# ---- the worker's side ---------------------------------------------------------------------------


def begin() -> tuple[Path, dict[str, Any]]:
    """The folder for results, and the request; whatever happens from now on is seen."""
    folder = Path(sys.argv[1])
    del sys.argv[1:]  # what the user's code reads there is for nobody but us
    line = sys.stdin.readline()
    if not line:
        os._exit(1)  # who has started it is gone
    lifeline = os.dup(0)
    _no_input()
    threading.Thread(target=_live_with, args=(lifeline,), daemon=True).start()
    stack = open(folder / _STACK, "w")  # noqa: SIM115 - open until the end
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)
    return folder, json.loads(line)


def _no_input() -> None:
    """What asks for input gets its end, of a terminal: programs also ask how wide that is."""
    try:
        master, terminal = os.openpty()
    except OSError:  # a machine without
        terminal = os.open(os.devnull, os.O_RDONLY)
    else:
        termios.tcsetwinsize(terminal, (24, 80))
        # Never closed, which would hang up on who reads.
        os.write(master, termios.tcgetattr(terminal)[6][termios.VEOF] * _ENDS)
    os.dup2(terminal, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the end


def _live_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing ever comes: it ends with the parent
    os.killpg(0, signal.SIGKILL)


def say(folder: Path, text: str) -> None:
    """Say what the worker is at."""
    write(folder, _PROGRESS, text)


def write(folder: Path, name: str, text: str) -> None:
    """Write a file that is there at once or not at all."""
    partial = folder / f"{name}.{os.getpid()}"
    partial.write_text(text)
    partial.rename(folder / name)


def leave() -> NoReturn:
    """End the worker. Taking PyTorch down module by module would take half a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
