"""The options that name what times rest on: a calibration, versions of libraries."""

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

Libraries = Annotated[
    str,
    typer.Option(
        metavar="NAME=VERSION,…",
        help="Old libraries: before cuBLAS 11 and cuDNN 7.6.3 misaligned "
        "sizes got no Tensor Cores, before cuDNN 8.5 wide groups in NHWC were slow. Such as "
        "cublas=10.2,cudnn=7.6.",
    ),
]
