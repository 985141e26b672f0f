"""Where output goes: data to stdout or a file, words about progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tilefit.console import table as table
from tilefit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")


def stdout() -> Console:
    """The console for data. rich honours ``NO_COLOR`` and ``COLUMNS``."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Say what is going on while it is, if anybody watches."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def watched(what: str, items: Iterable[Item], total: int) -> Iterable[Item]:
    """The items, with a progress bar on stderr where somebody watches."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total, console=Console(stderr=True))


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


def write_file(path: Path, content: str | bytes) -> None:
    """Write a report or a picture to a file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from error
