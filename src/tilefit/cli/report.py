"""``tilefit report``: what was found before, in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilefit.cli import output, report_output


def report(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="What check, profile or precision wrote with --output-format json.",
            show_default=False,
        ),
    ],
    show_all: report_output.ShowAll = False,
    ops: report_output.Operations = False,
    output_format: report_output.OutputFormat = None,
    output_file: report_output.OutputFile = None,
) -> None:
    """Show a report again: nothing is captured or priced, so it takes no time.

    Exit code: 0 whatever the report found, 2 could not run.
    """
    from tilefit.report import load

    document = load(file, note=output.note)
    report_output.show(document, output_format, output_file, show_all=show_all, ops=ops)
