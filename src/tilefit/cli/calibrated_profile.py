"""The option that names a calibrated profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Estimate with a profile that tilefit calibrate wrote; default: your own of the GPU, else the "
        "one that ships.",
    ),
]
