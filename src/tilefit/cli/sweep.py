"""``tilefit sweep``: the step at every point of a grid, the efficient frontier, the best batch that fits."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from tilefit.cli import output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.completion import gpu_option
from tilefit.cli.destination import Where
from tilefit.cli.fleet import RAY, fleet_at
from tilefit.cli.local_gpu import LocalGpu, local_gpu, predicted_gpu
from tilefit.cli.option_groups import Group, given, grouped
from tilefit.errors import UsageError
from tilefit.options import INPUT_SIZES, AnyOptions, ProgramOptions, TargetOptions, option, spelled

if TYPE_CHECKING:
    from tilefit.cost.priced import PricedGpu
    from tilefit.sweep.axes import Axis
    from tilefit.sweep.session import SweepSession

Format = Literal["text", "json", "csv"]
Against = Literal["size", "latency", "memory"]
_OPTIONS = "Options"

#: The largest batch that ``--best-batch`` looks at, where no range is given.
_MOST_BATCH = 4096


@dataclass(frozen=True)
class Splits:
    """Ways to split the step over GPUs: numbers, of which each makes a point."""

    tensor_parallel: str | None = option(None, "GPUs that share each layer.", metavar="N,…")
    pipeline_parallel: str | None = option(None, "Stages, each a part of the layers.", metavar="N,…")
    data_parallel: str | None = option(None, "Replicas, each with a part of the batch.", metavar="N,…")
    micro_batches: str | None = option(
        None, "Parts of a replica's batch; default: as many as stages.", metavar="N,…"
    )


@dataclass(frozen=True)
class Varied:
    """What varies, and how its points are made."""

    over: tuple[str, ...] = option(
        (),
        "What varies; repeat. VALUES: 8,16,32 or 1..512 (its powers of two) or 8..64:8. NAME: batch, seq, "
        "image-size, gpu, amp, dtype, compile, optimizer, fused-optimizer, channels-last, or a size of the "
        "model: an argument of its factory, an attribute of its configuration (hidden, vocab, n_head, …).",
        metavar="NAME=VALUES",
    )
    best_batch: bool = option(
        False,
        "Find the batch of the highest throughput that fits; with --measure in 6 measurements at most.",
    )
    measure: bool = option(False, "Run the steps on this machine's GPU; interrupted, it continues.")


@dataclass(frozen=True)
class Results:
    """Where the points are kept."""

    store: Path | None = option(None, "Store of results; default TILEFIT_STORE.", metavar="FILE")
    fresh: bool = option(False, "Compute points again that are in the store.")
    ray: str | None = option(None, RAY, metavar="ADDRESS")


@dataclass(frozen=True)
class View:
    """What is shown of the points."""

    against: Against = option("size", "Plot throughput against this: a size, latency or memory.")
    show_all: bool = option(False, "Every point in the table.", "--all")


@grouped
def sweep(
    context: typer.Context,
    target: step_options.Target,
    arguments: step_options.Arguments = None,
    *,
    varied: Annotated[Varied, Group(_OPTIONS)],
    gpu: Annotated[list[str] | None, gpu_option("GPU; repeat. Default: the one in this machine.")] = None,
    splits: Annotated[Splits, Group(step_options.SPLIT)],
    options: step_options.Options,
    capture: step_options.Timeout,
    program: step_options.OfProgram,
    calibration: CalibrationFile = None,
    results: Annotated[Results, Group(_OPTIONS)],
    view: Annotated[View, Group(report_output.PANEL)],
    where: Where,
) -> None:
    """What if: tilefit sweep hf:gpt2 --over batch=1..128 --over gpu=h200,l40s --amp bf16.

    Step time, throughput, TFLOP/s and memory of every point, the efficient frontier, and the best. Points are
    kept in the store: interrupted, the same command goes on where it stopped. A program is run with the sizes
    that its arguments leave open, and not kept: tilefit sweep train.py --over batch=8..64 -- --bs {batch}.
    """
    how = step_options.asked(context, target, options, program, arguments, of_models=("measure",))
    axes = _axes(context, varied.over, asdict(splits), options)
    _check_axes(axes, varied, how)
    if varied.best_batch:
        axes = _batches(axes)

    from tilefit.cli.bench import open_store
    from tilefit.sweep.axes import points
    from tilefit.sweep.run import Grid
    from tilefit.sweep.session import SweepSession

    if varied.measure and results.ray:
        raise UsageError("--measure measures this machine's GPU", hint="Leave out --ray.")
    local = local_gpu() if varied.measure else None
    devices = _gpus(axes, gpu, local, calibration)
    axes = [axis for axis in axes if axis.name != "gpu"]
    points(axes)
    with open_store(results.store) as opened, fleet_at(results.ray) as fleet:
        session = SweepSession(
            Grid(target, how, tuple(axes), devices),
            opened,
            timeout_s=capture.timeout,
            fresh=results.fresh,
            best_batch=varied.best_batch,
            local=local and (local.place, astuple(local.environment)),
            watch=output.watched,
            fleet=fleet,
        )
        predicted = session.predicted
        if session.known:
            print(
                f"{session.known} of {len(predicted)} points are from the store; "
                "--fresh computes them again.",
                file=sys.stderr,
            )
        with output.progress("Measuring") if local and varied.best_batch else nullcontext():
            swept = session.results(view.against)
    if swept.points:
        where.write(swept, show_all=view.show_all)
    if session.interrupted:
        _stopped(len(session.points), session)


def _stopped(points: int, session: SweepSession) -> NoReturn:
    """What was made before Ctrl-C is kept, but of programs."""
    kept = not isinstance(session.grid.options, ProgramOptions)
    on = " The same command goes on from there." if kept else ""
    print(f"Stopped early: {points} of {session.grid.size} points.{on}", file=sys.stderr)
    raise KeyboardInterrupt


def _axes(
    context: typer.Context, over: Iterable[str], splits: Mapping[str, str | None], options: TargetOptions
) -> list[Axis]:
    """What varies, as the options say.

    Raises:
        UsageError: an axis is not understood, or says what another option says.
    """
    from tilefit.sweep.axes import read_axes, read_axis

    axes = read_axes(over)
    _check_settings(context, axes, options.train)
    axes += [read_axis(name, text, spelled(name)) for name, text in splits.items() if text is not None]
    if {"amp", "dtype"} <= {axis.name for axis in axes}:
        raise UsageError("amp and dtype say the same thing", hint="Vary one of them.")
    if any(axis.name in INPUT_SIZES for axis in axes) and options.input:
        raise UsageError("--input fixes the inputs' sizes", hint="Leave it out, or vary something else.")
    return axes


def _check_axes(axes: Sequence[Axis], varied: Varied, how: AnyOptions) -> None:
    """Refuse nothing that varies, and what is predicted alone where points are to be measured."""
    from tilefit.sweep.axes import SPLITS

    if isinstance(how, ProgramOptions):
        _check_program(how, axes)
    if not axes and not varied.best_batch:
        raise UsageError("nothing varies", hint="Write --over batch=1..512, or --best-batch.")
    if varied.measure and any(axis.name in SPLITS for axis in axes):
        raise UsageError("a split over GPUs is predicted, not measured", hint="Leave out --measure.")
    if varied.measure and any(axis.name == "gpu" for axis in axes):
        raise UsageError("--measure measures this machine's GPU", hint="Leave out --over gpu=….")


def _check_program(program: ProgramOptions, axes: Iterable[Axis]) -> None:
    """Refuse what a program decides itself, and sizes that its arguments have no place for."""
    from tilefit.sweep.axes import SETTINGS, SPLITS

    for axis in axes:
        if axis.name in SETTINGS:
            raise UsageError(
                f"--over {axis.name.replace('_', '-')} has no effect: a program makes its own steps",
                hint="Where an argument of its own sets it, sweep once with each of its values.",
            )
        if axis.name not in ("gpu", "batch", *SPLITS):
            program.require_places([axis.name])


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
