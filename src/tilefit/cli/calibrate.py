"""``tilefit calibrate``: fit the cost model to this machine's GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefit.cli import output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tilefit.cost.calibration import Calibration
    from tilefit.gpus import Gpu
    from tilefit.measure.calibration import Progress

#: Seconds between two lines about progress.
_EVERY_S = 15.0
#: Looks at the host, each of which takes about 0.06 s. All of them before the first kernel is measured: from
#: then on CUPTI takes as long as a launch does itself (a reference step of 9 ms took 19 on an H100).
_LOOKS = 40
#: For a quick calibration, the fit included; the rest of a minute is for starting.
_QUICK_S = 54.0
#: It gets at least this, where the start takes most of a minute on a slow host.
_LEAST_QUICK_S = 25.0


def calibrate(
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for everything.")] = 4.0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Within a minute: how fast memory, multiprocessors and host are; the rest is what ships.",
        ),
    ] = False,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="What joins this machine's GPUs, by collectives among them; the rest stays as it is.",
        ),
    ] = False,
    merge: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: of two calibrations of a GPU, the better for each kind."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Measure nothing: show two calibrations side by side.")
    ] = None,
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
    if compare or merge:
        _of_files(compare, merge, output_file)
    elif collectives:
        _of_links(output_file)
    else:
        _of_kernels(minutes, quick, output_file)


def _of_kernels(minutes: float, quick: bool, output_file: Path | None) -> None:
    """Measure kernels and the host."""
    began_s = time.monotonic()

    def used_s() -> float:
        return time.monotonic() - began_s

    from tilefit.cli.local_gpu import local_gpu
    from tilefit.cost.calibration import with_links_of, write
    from tilefit.cost.priced import as_shipped, keep, resolve, user_path
    from tilefit.measure.calibration import Candidate, Design
    from tilefit.measure.calibration import calibrate as run
    from tilefit.measure.launch import Host
    from tilefit.measure.quick import quick as run_quick
    from tilefit.measure.run import pool_for
    from tilefit.measure.sessions import EventSession, kernel_times, session_kind

    local = local_gpu()
    (gpu,) = resolve(local.environment.gpu)
    path = output_file or user_path(gpu.name)
    aside = keep(path)
    pool = pool_for(local.place)

    session = session_kind()
    if session is EventSession:
        print(
            "CUPTI sees no kernels here: CUDA events time them, gaps within a call included", file=sys.stderr
        )

    def measure(few: Sequence[Candidate]) -> list[float | None]:
        return kernel_times([partial(each.build, pool) for each in few], session())

    environment, host = local.environment, Host(local.place, turns=_LOOKS)
    about: dict[str, Any] = {
        "versions": {name: getattr(environment, name) for name in ("torch", "cuda", "cudnn", "driver")},
        "on_progress": _teller(used_s),
    }
    if quick:
        print(f"Calibrating quickly for {gpu.title}", file=sys.stderr)
        found = run_quick(gpu, measure, budget_s=max(_LEAST_QUICK_S, _QUICK_S - used_s()), **about)
    else:
        print(f"Calibrating for {gpu.title}, {minutes:g} min; Ctrl-C: fit to what there is", file=sys.stderr)
        budget_s = max(1.0, 60 * minutes - used_s())
        before, place = as_shipped(gpu), str(local.place)
        found = run(gpu, measure, Design(budget_s=budget_s), before=before, device=place, **about)
    found = host.noted(found)
    output.stdout().print(_factors(gpu, found) if quick else _table(gpu, found), _host(found), sep="\n")
    write(with_links_of(found, path), path)
    print(f"Calibration written to {path}, after {used_s():.0f} s", file=sys.stderr)
    if aside:
        print(f"The damaged calibration that was there is now {aside}", file=sys.stderr)
    if output_file:
        print(f"Use it: tilefit check TARGET --calibration {output_file}", file=sys.stderr)


def _of_links(output_file: Path | None) -> None:
    """Measure collectives, and write what they say into the calibration that is there."""
    from tilefit.cli.local_gpu import local_gpus
    from tilefit.cost.calibration import Calibration, load, write
    from tilefit.cost.priced import keep, resolve, user_path
    from tilefit.measure.calibration import origin
    from tilefit.measure.collectives import Timed, measure, sizes_within, with_links
    from tilefit.measure.ranks import Ranks
    from tilefit.units import capacity, seconds, share

    name, count, device = local_gpus()
    (gpu,) = resolve(name)
    path = output_file or user_path(gpu.name)
    aside = keep(path)
    rows: list[Timed] = []
    with (
        output.progress(f"Measuring collectives among {count} {gpu.title}") as tell,
        Ranks(count, device) as ranks,
    ):
        for row in measure(ranks, sizes_within(gpu.memory_bytes)):
            rows.append(row)
            tell(f"{row.function} among {row.ranks}, {capacity(row.size_bytes)} in {seconds(row.time_s)}")
    before = load(path) if path.exists() else Calibration({}, origin(gpu, None) | {"networks": {}})
    found = with_links(before, gpu, rows)
    write(found, path)
    errors = found.about["links"]["errors"]
    output.stdout().print(
        f"{gpu.title}: {len(rows)} collectives among {count} GPUs\n"
        f"Error on sizes that were not fitted to: {share(errors['before'])} before, "
        f"{share(errors['after'])} after (median)"
    )
    print(f"Calibration written to {path}", file=sys.stderr)
    if aside:
        print(f"The damaged calibration that was there is now {aside}", file=sys.stderr)


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
    )


def _host(found: Calibration) -> str:
    """What was found of the host."""
    scale, spread = found.launch_scale, found.about["launch_spread"]
    return (
        f"This host takes {scale:.2f} times as long to launch a step as the model assumes "
        f"({scale / spread:.2f} to {scale * spread:.2f})."
    )


def _factors(gpu: Gpu, found: Calibration) -> str:
    """What a quick calibration found."""
    from tilefit.units import share

    assert found.quick is not None
    before, after = (share(found.about["errors"][name]) for name in ("before", "after"))
    memory, clock = found.quick
    return (
        f"{gpu.title}: memory at {memory:.2f}, multiprocessors at {clock:.2f} of what was assumed\n"
        f"Mean error on operations that were not fitted to: {before} before, {after} after"
    )


def _of_files(
    compare: tuple[Path, Path] | None, merge: tuple[Path, Path] | None, output_file: Path | None
) -> None:
    """Compare or merge calibrations that were made before."""
    from tilefit.cost.calibration import merged, read, write
    from tilefit.errors import UsageError

    if compare:
        output.stdout().print(_compared(*map(read, compare)))
    if merge:
        if output_file is None:
            raise UsageError("a merged calibration needs a file", hint="Name it: --output FILE.")
        found = merged(*map(read, merge))
        write(found, output_file)
        print(f"Calibration of {', '.join(found.networks)} written to {output_file}", file=sys.stderr)


def _compared(first: Calibration, second: Calibration) -> RenderableType:
    """Two calibrations, fact by fact."""
    from tilefit.units import share

    table = output.table("", ">first", ">second")
    both = first, second
    for name in ("gpu", "date", "launch_scale"):
        table.add_row(name.replace("_", " "), *(str(each.about.get(name, "–")) for each in both))
    for kind in dict.fromkeys([*first.networks, *second.networks]):
        errors = (each.about["networks"].get(kind, {}).get("errors", {}).get("calibrated") for each in both)
        table.add_row(f"error of {kind}", *("–" if error is None else share(error) for error in errors))
    for name in first.about.get("constants", {}).keys() & second.about.get("constants", {}).keys():
        values = [each.about["constants"][name] for each in both]
        if values[0] != values[1]:
            table.add_row(
                name.replace("_", " "),
                *(f"{each:.4g}" if isinstance(each, float) else str(each) for each in values),
            )
    return table
