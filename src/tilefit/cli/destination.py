"""Where the results of curves and sweeps go: the options for it, and the writing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from tilefit.cli import output
from tilefit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

Format = Literal["text", "json", "csv"]

PANEL = "Output"
_ENDINGS: dict[str, Format] = {".json": "json", ".csv": "csv"}
_PICTURES = (".svg", ".png")

OutputFormat = Annotated[
    Format | None,
    typer.Option(
        metavar="FORMAT",
        help="text, json or csv; default: by the ending of the file, else text.",
        rich_help_panel=PANEL,
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output-file",
        "--output",
        metavar="FILE",
        callback=output.writable,
        help="Write there, not to stdout.",
        rich_help_panel=PANEL,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=output.writable,
        help="Draw it too: FILE.svg or FILE.png.",
        rich_help_panel=PANEL,
    ),
]


class Destination(NamedTuple):
    """Where results go.

    Attributes:
        format: Their format.
        file: None for stdout.
        plot: A picture besides.
    """

    format: Format
    file: Path | None
    plot: Path | None

    def write(
        self,
        text: Callable[[int], RenderableType],
        others: dict[str, Callable[[], str]],
        picture: Callable[[Path], str | bytes],
    ) -> None:
        """Print or write results.

        Args:
            text: Makes the text for a width in columns.
            others: Make the other formats.
            picture: Draws the picture.
        """
        if self.plot:
            output.write_file(self.plot, picture(self.plot))
        console = output.stdout()
        if self.format == "text" and self.file is None:
            console.print(text(console.width))
            return
        written = output.as_text(text(console.width)) if self.format == "text" else others[self.format]()
        if self.file is None:
            print(written, end="")
        else:
            output.write_file(self.file, written)


def destination(form: Format | None, file: Path | None, plot: Path | None) -> Destination:
    """Where results go, by the options; wrong names are refused before anything is computed.

    Raises:
        UsageError: a picture is to be written that is none, or where no picture goes.
    """
    if plot and plot.suffix.lower() not in _PICTURES:
        raise UsageError(
            "a picture is an SVG or a PNG",
            where=str(plot),
            hint="End the name in .svg or .png: --plot FILE.svg.",
        )
    if file and file.suffix.lower() in _PICTURES:
        raise UsageError("pictures are drawn by --plot", where=str(file), hint=f"Write --plot {file}.")
    return Destination(form or output.by_ending(file, _ENDINGS, "text"), file, plot)
