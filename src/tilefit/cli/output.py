"""Where output goes: data to stdout or a file, words about progress to stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tilefit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

Item = TypeVar("Item")
Form = TypeVar("Form", bound=str)


def stdout() -> Console:
    """The console for data. rich honours ``NO_COLOR`` and ``COLUMNS``."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def table(*columns: str) -> Table:
    """A table without lines; a heading that starts with ``>`` aligns its column to the right."""
    from rich.table import Table

    made = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        show_edge=False,
        show_header=any(columns),
        header_style="dim",
    )
    for column in columns:
        # In a narrow terminal a number goes on in the next line; cut off, it would be another number.
        made.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return made


def as_text(shown: RenderableType) -> str:
    """What would be on the terminal, without colour."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=stdout().width, color_system=None).print(shown)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


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


def by_ending(file: Path | None, forms: Mapping[str, Form], otherwise: Form) -> Form:
    """The format that the ending of an output file asks for."""
    return forms.get(file.suffix.lower(), otherwise) if file else otherwise


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
