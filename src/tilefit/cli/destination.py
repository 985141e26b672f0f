"""Where the results of curves and sweeps go: the options for it, and the writing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tilefit import formats
from tilefit.cli import output, report_output
from tilefit.cli.option_groups import Group
from tilefit.errors import UsageError
from tilefit.options import option

Format = Literal["text", "json", "csv"]

_PICTURES = (".svg", ".png")


@dataclass(frozen=True)
class Destination:
    """Where results go; names that cannot be meant are refused before anything is computed.

    Raises:
        UsageError: a picture is to be written that is none, or where no picture goes; no format is named, and
            the file's ending is that of none.
    """

    output_format: Format | None = option(
        None, "text, json or csv; default: by the ending of the file, else text.", metavar="FORMAT"
    )
    output_file: Path | None = option(
        None,
        "Write there, not to stdout.",
        "--output-file",
        "--output",
        metavar="FILE",
        callback=output.writable,
    )
    plot: Path | None = option(
        None, "Draw it too: FILE.svg or FILE.png.", metavar="FILE", callback=output.writable
    )

    def __post_init__(self) -> None:
        plot, file = self.plot, self.output_file
        if plot and plot.suffix.lower() not in _PICTURES:
            raise UsageError(
                "a picture is an SVG or a PNG",
                where=str(plot),
                hint="End the name in .svg or .png: --plot FILE.svg.",
            )
        if file and file.suffix.lower() in _PICTURES:
            raise UsageError("pictures are drawn by --plot", where=str(file), hint=f"Write --plot {file}.")
        formats.require_ending(file, self.output_format, get_args(Format))

    def write(self, document: object, **options: Any) -> None:
        """Draw, and print or write results; ``options`` as of :func:`tilefit.formats.render`."""
        if self.plot:
            picture = formats.by_ending(document, self.plot.suffix)
            formats.write(self.plot, formats.make(document, picture))
        report_output.show(document, self.output_format, self.output_file, trimmed=False, **options)


Where = Annotated[Destination, Group(report_output.PANEL)]
