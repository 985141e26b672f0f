"""``tilefit sweep``: the step at every point of a grid, the efficient frontier, the best batch that fits."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from tilefit.cli import output, step_options
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.destination import PANEL, Destination, OutputFile, OutputFormat, Plot, destination
from tilefit.cli.local_gpu import LocalGpu, local_gpu, predicted_gpu
from tilefit.cli.option_groups import given, grouped
from tilefit.errors import UsageError
from tilefit.options import INPUT_SIZES, spelled

if TYPE_CHECKING:
    from tilefit.cost.priced import PricedGpu
    from tilefit.sweep.axes import Axis
    from tilefit.sweep.kept import Kept
    from tilefit.sweep.point import Point
    from tilefit.sweep.run import Grid

Format = Literal["text", "json", "csv"]
Against = Literal["size", "latency", "memory"]

#: The largest batch that ``--best-batch`` looks at, where no range is given.
_MOST_BATCH = 4096


def _split_option(help: str) -> typer.models.OptionInfo:
    option = typer.Option(metavar="N,…", help=help, rich_help_panel=step_options.SPLIT)
    assert isinstance(option, typer.models.OptionInfo)
    return option


@grouped
def sweep(
    context: typer.Context,
    target: step_options.Target,
    *,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="What varies; repeat. VALUES: 8,16,32 or 1..512 (its powers of two) or 8..64:8. NAME: "
            "batch, seq, image-size, gpu, amp, dtype, compile, optimizer, fused-optimizer, channels-last, "
            "or a size of the model: an argument of its factory, an attribute of its configuration (hidden, "
            "vocab, n_head, …).",
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="GPU; repeat. Default: the one in this machine.")
    ] = None,
    best_batch: Annotated[
        bool,
        typer.Option(
            "--best-batch",
            help="Find the batch of the highest throughput that fits; with --measure in 6 measurements at "
            "most.",
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run the steps on this machine's GPU; interrupted, it continues."),
    ] = False,
    tensor_parallel: Annotated[str | None, _split_option("GPUs that share each layer.")] = None,
    pipeline_parallel: Annotated[str | None, _split_option("Stages, each a part of the layers.")] = None,
    data_parallel: Annotated[str | None, _split_option("Replicas, each with a part of the batch.")] = None,
    micro_batches: Annotated[
        str | None, _split_option("Parts of a replica's batch; default: as many as stages.")
    ] = None,
    options: step_options.Options,
    timeout: step_options.Timeout = step_options.TIMEOUT_S,
    calibration: CalibrationFile = None,
    store: Annotated[
        Path | None, typer.Option("--store", metavar="FILE", help="Store of results; default TILEFIT_STORE.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compute points again that are in the store.")
    ] = False,
    against: Annotated[
        Against,
        typer.Option(help="Plot throughput against this: a size, latency or memory.", rich_help_panel=PANEL),
    ] = "size",
    show_all: Annotated[
        bool, typer.Option("--all", help="Every point in the table.", rich_help_panel=PANEL)
    ] = False,
    output_format: OutputFormat = None,
    output_file: OutputFile = None,
    plot: Plot = None,
) -> None:
    """What if: tilefit sweep hf:gpt2 --over batch=1..128 --over gpu=h200,l40s --amp bf16.

    Step time, throughput, TFLOP/s and memory of every point, the efficient frontier, and the best. Points are
    kept in the store: interrupted, the same command goes on where it stopped.
    """
    from tilefit.sweep.axes import SPLITS, points, read_axes, read_axis

    where = destination(output_format, output_file, plot)
    splits = (tensor_parallel, pipeline_parallel, data_parallel, micro_batches)
    axes = read_axes(over or ())
    _check_settings(context, axes, options.train)
    for name, text in zip(SPLITS, splits, strict=True):
        if text is not None:
            axes.append(read_axis(name, text, spelled(name)))
    if {"amp", "dtype"} <= {axis.name for axis in axes}:
        raise UsageError("amp and dtype say the same thing", hint="Vary one of them.")
    if not axes and not best_batch:
        raise UsageError("nothing varies", hint="Write --over batch=1..512, or --best-batch.")
    if any(axis.name in ("batch", "seq", "image_size") for axis in axes) and options.input:
        raise UsageError("--input fixes the inputs' sizes", hint="Leave it out, or vary something else.")
    if measure and any(axis.name in SPLITS for axis in axes):
        raise UsageError("a split over GPUs is predicted, not measured", hint="Leave out --measure.")
    if measure and any(axis.name == "gpu" for axis in axes):
        raise UsageError("--measure measures this machine's GPU", hint="Leave out --over gpu=….")
    if best_batch:
        axes = _batches(axes)

    from tilefit.cli.bench import open_store
    from tilefit.sweep.kept import Kept
    from tilefit.sweep.run import Grid

    local = local_gpu() if measure else None
    devices = _gpus(axes, gpu, local, calibration)
    axes = [axis for axis in axes if axis.name != "gpu"]
    points(axes)
    grid = Grid(target, options, tuple(axes), devices)
    sizes = ((name, getattr(options, name)) for name in INPUT_SIZES)
    # What is fixed and cannot be seen from the axes is told above the results.
    settings = [
        "training step" if options.train else "inference",
        *([f"{options.amp} autocast"] if options.autocast else []),
        *(["compiled"] if options.compile else []),
        *(f"{name} {value}" for name, value in sizes if value is not None),
    ]
    with open_store(store) as opened:
        _run(
            grid,
            Kept(opened, target, fresh=fresh),
            local and Kept(opened, target, fresh=fresh, measured=astuple(local.environment)),
            local,
            timeout,
            best_batch,
            _Shown(settings, against, show_all, where),
        )


class _Shown(NamedTuple):
    """How the results are shown."""

    settings: Sequence[str]
    against: Against
    show_all: bool
    where: Destination


def _run(
    grid: Grid,
    kept: Kept,
    kept_measured: Kept | None,
    local: LocalGpu | None,
    timeout_s: float,
    best_batch: bool,
    shown: _Shown,
) -> None:
    from tilefit.sweep.results import Results
    from tilefit.sweep.run import Predictions

    predictions = Predictions(grid, timeout_s, kept)
    found: list[Point] = []
    interrupted = False
    try:
        for point in output.watched("Predicting", predictions, grid.size):
            found.append(point)
    except KeyboardInterrupt:
        interrupted = True
    if kept.found:
        print(
            f"{kept.found} of {len(found)} points are from the store; --fresh computes them again.",
            file=sys.stderr,
        )
    notes: list[str] = []
    if best_batch and not interrupted:
        found = _fitting(found)
    if local and not interrupted:
        assert kept_measured is not None
        from tilefit.sweep.measured import measured, search

        try:
            if best_batch:
                with output.progress("Measuring"):
                    found, said = search(grid, found, local.place, kept_measured)
                notes.append(said)
            else:
                real = measured(grid, found, local.place, kept_measured)
                found, predicted = [], found
                for point in output.watched("Measuring", real, len(predicted)):
                    found.append(point)
        except KeyboardInterrupt:
            interrupted = True
        notes.append("Measured: steps back to back, random weights and inputs, the median of five turns.")
    if predictions.failure and all(point.error for point in found):
        raise predictions.failure
    if found:
        results = Results(
            grid,
            tuple(shown.settings),
            _sorted(grid, found),
            tuple(dict.fromkeys(notes)),
            shown.against,
            best_batch,
        )
        shown.where.write(results, show_all=shown.show_all)
    if interrupted:
        print(
            f"Stopped early: {len(found)} of {grid.size} points. The same command goes on from there.",
            file=sys.stderr,
        )
        raise KeyboardInterrupt


def _check_settings(context: typer.Context, axes: Iterable[Axis], train: bool) -> None:
    """Refuse what is both fixed and varied, and an optimizer varied where none runs."""
    for axis in axes:
        for name in ("amp", "tf32") if axis.name == "dtype" else (axis.name,):
            if given(context, name):
                option = spelled(name)
                raise UsageError(
                    f"{axis.name} varies, and {option} fixes it",
                    hint=f"Leave out {option}, or --over {axis.name}.",
                )
        if axis.name in ("optimizer", "fused_optimizer") and not train:
            raise UsageError(
                f"--over {axis.name.replace('_', '-')} has no effect: --infer runs no optimizer",
                hint="Leave it out.",
            )


def _batches(axes: list[Axis]) -> list[Axis]:
    """The batches that the best is sought among; nothing else varies."""
    from tilefit.sweep.axes import Axis
    from tilefit.sweep.best import batches

    others = [axis.name for axis in axes if axis.name not in ("batch", "gpu")]
    if others:
        raise UsageError(
            f"--best-batch varies the batch alone, not {', '.join(others)}",
            hint="Leave out --over, or --best-batch: the frontier of a sweep shows the best of each.",
        )
    return [Axis("batch", batches(_MOST_BATCH)), *axes] if not any(a.name == "batch" for a in axes) else axes


def _gpus(
    axes: Sequence[Axis], names: list[str] | None, local: LocalGpu | None, calibration: Path | None
) -> tuple[PricedGpu, ...]:
    from tilefit.cost.priced import resolve

    varied = next((axis.values for axis in axes if axis.name == "gpu"), None)
    if local:
        return (predicted_gpu(names[0] if names else None, local, calibration),)
    return tuple(resolve([str(name) for name in varied] if varied else names, calibration))


def _fitting(points: list[Point]) -> list[Point]:
    """Without the batches that do not fit, but for the first of them."""
    fitting = [point for point in points if point.runs]
    beyond = sorted((p for p in points if not p.fits and not p.error), key=lambda point: point.samples)
    return [*fitting, *beyond[:1]] if fitting else points


def _sorted(grid: Grid, points: Iterable[Point]) -> tuple[Point, ...]:
    """In the order of the grid: the first axis varies slowest."""
    order = {axis.name: {value: i for i, value in enumerate(axis.values)} for axis in grid.axes}
    gpus = [gpu.name for gpu in grid.gpus]
    return tuple(
        sorted(
            points,
            key=lambda p: (gpus.index(p.gpu), *(order[name].get(p.at[name], 0) for name in order)),
        )
    )
