"""The option that names a calibrated profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _use(context: typer.Context, path: Path | None) -> Path | None:
    """Estimates of this command rest on the file."""
    if path is not None and not context.resilient_parsing:
        from tilefit.cost.lookup import using

        context.with_resource(using(path))
    return path


ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        callback=_use,
        help="Estimate with a profile that tilefit calibrate wrote; default: your own of the GPU, else the "
        "one that ships.",
    ),
]
