"""``tilefit report``: what was found before, in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilefit.cli import output, report_output
from tilefit.cli.option_groups import grouped


@grouped
def report(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="What check, profile or precision wrote with --output-format json.",
            show_default=False,
        ),
    ],
    *,
    shown: report_output.Shown,
) -> None:
    """Show a report again: nothing is captured or priced, so it takes no time.

    Exit code: 0 whatever the report found, 2 could not run.
    """
    from tilefit.report import load

    document = load(file, note=output.note)
    shown.show(document)
