"""``tilefit calibrate``: fit the cost model to this machine's GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tilefit.cli import output


def calibrate(
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for everything.")] = 5.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Profile to write; default tilefit-GPU.json.")
    ] = None,
) -> None:
    """Measure this GPU by the products that tell most, fit the cost model, and write a profile to share."""
    from tilefit import units
    from tilefit.checker import resolve
    from tilefit.measure import timer
    from tilefit.measure.calibration import calibrate as run
    from tilefit.measure.calibration import save
    from tilefit.measure.environment import current
    from tilefit.measure.run import measure_op, pool_for

    device = timer.CudaDevice()
    gpu = resolve(None)[0]
    environment, pool = current(device.device), pool_for(device.device)
    software = (
        f"driver {environment.driver}, torch {environment.torch}, CUDA {environment.cuda}, "
        f"cuDNN {environment.cudnn}"
    )
    with output.progress(f"Calibrating {gpu.title}, at most {minutes:g} min"):
        found = run(
            gpu,
            lambda product: measure_op(product, pool, device, environment).median_s,
            budget_s=60 * minutes,
            software=software,
        )
    path = out or Path(f"tilefit-{gpu.name}.json")
    save(found, path)
    print(
        f"{gpu.title}: {found.measured} products measured. Mean error on those held out: "
        f"{units.share(found.error_before)} before, {units.share(found.error_after)} after."
    )
    print(f"Profile written to {path}", file=sys.stderr)
