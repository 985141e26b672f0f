"""``tilefit calibrate``: fit the cost model to this machine's GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilefit.cli import output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tilefit.cost.calibration import Calibration
    from tilefit.gpus import Gpu
    from tilefit.measure.calibration import Progress

#: Replays of each measured operation: their median is within 1 % of that of many.
_REPLAYS = 3
#: Seconds between two lines about progress.
_EVERY_S = 15.0


def calibrate(
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for everything.")] = 4.0,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Calibration to write, to share or to use with --calibration; default: this user's own, "
            "which other commands use by themselves.",
        ),
    ] = None,
) -> None:
    """Measure this GPU where that tells most, fit the cost model to it, and write a calibration."""
    began_s = time.monotonic()

    def used_s() -> float:
        return time.monotonic() - began_s

    from tilefit.cli.local_gpu import local_gpu
    from tilefit.cost.calibration import write
    from tilefit.cost.priced import keep, resolve, shipped, user_path
    from tilefit.measure.calibration import ChangeSet, Design
    from tilefit.measure.calibration import calibrate as run
    from tilefit.measure.launch import launch_scale
    from tilefit.measure.run import pool_for, time_call

    local = local_gpu()
    (gpu,) = resolve(local.environment.gpu)
    path = output_file or user_path(gpu.name)
    aside = keep(path)
    pool = pool_for(local.place)

    def measure(candidate: ChangeSet) -> float:
        return time_call(candidate.op, lambda: candidate.build(pool), local.device, replays=_REPLAYS).median_s

    print(f"Calibrating for {gpu.title}, {minutes:g} min; Ctrl-C: fit to what there is", file=sys.stderr)
    environment = local.environment
    found = run(
        gpu,
        measure,
        Design(budget_s=max(1.0, 60 * minutes - used_s())),
        shipped=shipped(gpu.name),
        launch_scale=launch_scale(local.place),
        versions={
            "torch": environment.torch,
            "cuda": environment.cuda,
            "cudnn": environment.cudnn,
            "driver": environment.driver,
        },
        device=str(local.place),
        on_progress=_teller(used_s),
    )
    write(found, path)
    output.stdout().print(_table(gpu, found))
    print(f"Calibration written to {path}, after {used_s():.0f} s", file=sys.stderr)
    if aside:
        print(f"The damaged calibration that was there is now {aside}", file=sys.stderr)
    if output_file:
        print(f"Use it: tilefit check TARGET --calibration {output_file}", file=sys.stderr)


def _teller(used_s: Callable[[], float]) -> Callable[[Progress], None]:
    """Says every few seconds how far it is."""
    told_s = 0.0

    def tell(progress: Progress) -> None:
        nonlocal told_s
        if used_s() >= told_s + _EVERY_S:
            told_s = used_s()
            print(f"{told_s:4.0f} s: {progress.kind}, {progress.measured} measured", file=sys.stderr)

    return tell


def _table(gpu: Gpu, found: Calibration) -> RenderableType:
    """What was measured of each kind, and the errors on what was never fitted to."""
    from rich.console import Group

    from tilefit.units import share

    table = output.table("", ">fitted to", ">held out", ">datasheet", ">shipped", ">calibrated")
    for kind, facts in found.about["networks"].items():
        errors = facts["errors"]
        shipped = share(errors["shipped"]) if "shipped" in errors else "–"
        table.add_row(
            kind,
            str(facts["trained_rows"]),
            str(facts["held_out_rows"]),
            share(errors["datasheet"]),
            shipped,
            share(errors["calibrated"]),
        )
    return Group(
        f"{gpu.title}: mean error on families of shapes that were not fitted to",
        table,
        f"This host takes {found.launch_scale:.2f} times as long to launch a step as the model assumes.",
    )
