"""How a command shows a report: the options that every such command has, and the showing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit.cli import output

if TYPE_CHECKING:
    from tilefit.report import Document

#: The formats of :data:`tilefit.report.FORMATS`.
Format = Literal["text", "markdown", "concise", "json", "html", "sarif", "github", "junit"]

#: The format of a file by its ending, where none is asked for.
ENDINGS: dict[str, Format] = {
    ".md": "markdown",
    ".json": "json",
    ".html": "html",
    ".htm": "html",
    ".sarif": "sarif",
    ".xml": "junit",
}

PANEL = "Output"

OutputFormat = Annotated[
    Format | None,
    typer.Option(
        metavar="FORMAT",
        help="text, markdown, concise, json, html, sarif, github or junit; default: by the ending of the "
        "file, else text.",
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
    document: Document,
    format: Format | None,
    file: Path | None,
    *,
    show_all: bool = False,
    ops: bool = False,
) -> None:
    """Write a report to a file, or to stdout, there in colour where it is a terminal.

    Raises:
        UsageError: the file cannot be written.
    """
    from tilefit.report import render
    from tilefit.report.terminal import Terminal

    format = format or output.by_ending(file, ENDINGS, "text")
    console = output.stdout()
    if format == "text" and file is None and console.is_terminal:
        console.print(Terminal(document, show_all=show_all, ops=ops))
        return
    text = render(document, format, show_all=show_all, ops=ops, width=console.width)
    if file is None:
        print(text, end="")
    else:
        output.write_file(file, text)
