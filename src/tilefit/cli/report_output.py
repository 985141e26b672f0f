"""How a command shows a report: the options that every such command has, and the showing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tilefit import formats
from tilefit.cli import output
from tilefit.formats import FORMATS
from tilefit.formats import Format as Format

PANEL = "Output"

OutputFormat = Annotated[
    Format | None,
    typer.Option(
        metavar="FORMAT",
        help=f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}; default: by the ending of the file, else text.",
        rich_help_panel=PANEL,
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=output.writable,
        help="Write there instead of to stdout.",
        rich_help_panel=PANEL,
    ),
]
ShowAll = Annotated[
    bool, typer.Option("--all", help="Every finding with all its arithmetic.", rich_help_panel=PANEL)
]
Operations = Annotated[
    bool, typer.Option("--ops", help="The operations too, by time.", rich_help_panel=PANEL)
]


def show(
    document: object, format: str | None, file: Path | None, *, trimmed: bool = True, **options: Any
) -> None:
    """Write a document to a file, or to stdout, there in colour where it is a terminal.

    Args:
        document: A report, or any other document that has renderers.
        format: Its format; None: by the ending of the file, else text.
        file: None for stdout.
        trimmed: On stdout without the blanks that fill its columns, where it is no terminal.
        options: As of :func:`tilefit.formats.render`.

    Raises:
        UsageError: the file cannot be written.
    """
    format = format or formats.by_ending(document, file.suffix if file else "")
    console = output.stdout()
    if format == "text" and file is None and (console.is_terminal or not trimmed):
        console.print(formats.make(document, width=console.width, **options), crop=False)
        return
    text = formats.render(document, format, width=console.width, **options)
    if file is None:
        print(text, end="")
    else:
        output.write_file(file, text)
