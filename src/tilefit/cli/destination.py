"""Where the results of curves and sweeps go: the options for it, and the writing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from tilefit import formats
from tilefit.cli import output, report_output
from tilefit.errors import UsageError

Format = Literal["text", "json", "csv"]

PANEL = "Output"
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
        format: Their format; None: by the ending of the file, else text.
        file: None for stdout.
        plot: A picture besides.
    """

    format: Format | None
    file: Path | None
    plot: Path | None

    def write(self, document: object, **options: Any) -> None:
        """Draw, and print or write results; ``options`` as of :func:`tilefit.formats.render`."""
        if self.plot:
            picture = formats.by_ending(document, self.plot.suffix)
            output.write_file(self.plot, formats.make(document, picture))
        report_output.show(document, self.format, self.file, trimmed=False, **options)


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
    return Destination(form, file, plot)
