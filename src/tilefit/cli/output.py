"""Where output goes: data to stdout or a file, words about progress to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, TypeVar

from tilefit.console import console
from tilefit.console import facts as facts
from tilefit.console import table as table
from tilefit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")


def stdout() -> Console:
    """The console for data. rich honours ``NO_COLOR`` and ``COLUMNS``."""
    return console()


#: Seconds after which a line is written of what still goes on, where nobody watches.
_PATIENCE_S = 2.0
#: Seconds between two lines of how many of several things are done.
_EVERY_S = 10.0


@contextmanager
def progress(message: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is going on while it is; what the block is given says more of it.

    In a terminal it is one line that changes; elsewhere each thing that takes some time gets a line.
    """
    if sys.stderr.isatty():
        from rich.text import Text

        with console(stderr=True).status(Text(message)) as status:
            yield lambda detail: status.update(Text(f"{message}: {detail}"))
        return
    stream = sys.stderr
    waiting: list[Timer] = []

    def say(text: str) -> None:
        while waiting:
            waiting.pop().cancel()
        timer = Timer(_PATIENCE_S, print, (f"{text} …",), {"file": stream, "flush": True})
        timer.daemon = True
        timer.start()
        waiting.append(timer)

    say(message)
    try:
        yield lambda detail: say(f"{message}: {detail}")
    finally:
        for timer in waiting:
            timer.cancel()


def watched(what: str, items: Iterable[Item], total: int) -> Iterable[Item]:
    """The items, with a progress bar on stderr; where nobody watches, with a line now and then."""
    if not sys.stderr.isatty():
        return _told(what, items, total)
    from rich.progress import track

    return track(items, what, total, console=console(stderr=True))


def _told(what: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    told_s = time.monotonic()
    with progress(what) as tell:
        for done, item in enumerate(items, 1):
            yield item
            if time.monotonic() - told_s >= _EVERY_S:
                told_s = time.monotonic()
                tell(f"{done} of {total}")


def note(message: str) -> None:
    """Say something beside the data, on stderr."""
    print(f"note: {message}", file=sys.stderr)


def writable(path: Path | None) -> Path | None:
    """The file of an option, refused before anything runs where it could not be written in the end.

    Raises:
        UsageError: there is no such folder, or the name is that of one.
    """
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"cannot be written: there is no folder {path.parent}", where=str(path))
    if path is not None and path.is_dir():
        raise UsageError("cannot be written: it is a folder", where=str(path), hint="Name a file in it.")
    return path
