"""What is shown with rich, which is imported when something is."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


def console(**how: Any) -> Console:
    """A console that shows text as it is: what stands in brackets or between colons may be the user's own."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **how)


def table(*columns: str, rows: Iterable[Iterable[str | Text]] = ()) -> Table:
    """A table without lines; a heading that starts with ``>`` aligns its column to the right."""
    from rich.table import Table
    from rich.text import Text

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
    for row in rows:
        # As it is in the console of others, too.
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def facts(rows: Iterable[tuple[str, str]], style: str = "dim") -> Table:
    """Labels, and what belongs to each."""
    from rich.text import Text

    return table("", "", rows=((Text(label, style), Text(value)) for label, value in rows))


def plain(shown: RenderableType, width: int) -> str:
    """What would be on a terminal of so many columns, without colour."""
    file = io.StringIO()
    console(file=file, width=width, color_system=None, legacy_windows=False).print(shown, crop=False)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
