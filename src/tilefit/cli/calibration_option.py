"""The option that names a calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Estimate with a calibration that tilefit calibrate wrote; default: your own of the GPU, else "
        "the one that ships.",
    ),
]
