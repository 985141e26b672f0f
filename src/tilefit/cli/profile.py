"""``tilefit profile``: what a real run spends its time on."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefit import gpus
from tilefit.capture.naming import is_script, require_readable
from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.completion import gpu_option
from tilefit.cli.option_groups import Group, grouped, refuse_given
from tilefit.errors import TilefitError, UsageError
from tilefit.options import TargetOptions, option

if TYPE_CHECKING:
    from tilefit.profiling.imported import Imported
    from tilefit.profiling.session import Profile

_RUN = "The run"
_TRACES = (".json", ".json.gz")
#: Options that describe the step of a model.
_OF_MODELS = [
    each.name for each in fields(TargetOptions) if "help" in each.metadata and each.name != "on_cpu"
]


@dataclass(frozen=True)
class Window:
    """Which steps of a run are profiled."""

    steps: int = option(3, "Steps to profile.", min=1, metavar="N")
    skip: int = option(
        5,
        "Steps before anything is measured. A script's step is one of its optimizer; with --skip 0 --plain 0 "
        "profiling begins with the script.",
        min=0,
        metavar="N",
    )
    plain: int = option(5, "Steps then timed without the profiler, to tell what it adds.", min=0, metavar="N")


SETTINGS = {"cls": step_options.ScriptCommand}


def _is_trace(text: str) -> bool:
    return text.endswith(_TRACES) and not text.startswith("hf:")


@grouped
def profile(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET|SCRIPT|TRACE",
            help="A model as for tilefit check, a script (train.py), or a trace that torch.profiler exported "
            "(trace.json, trace.json.gz).",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.", show_default=False)
    ] = None,
    *,
    gpu: Annotated[
        str | None,
        gpu_option("GPU that rates are compared with. Default: the one in this machine, or the trace's."),
    ] = None,
    calibration: CalibrationFile = None,
    window: Annotated[Window, Group(_RUN)],
    options: step_options.OfRun,
    selection: step_options.Rules,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the trace with the findings, for ui.perfetto.dev; .json or .json.gz.",
            rich_help_panel=report_output.PANEL,
        ),
    ] = None,
    shown: report_output.Shown,
) -> int:
    """Profile a run: which operation, module and line the GPU's time goes to, and what to change.

    Options go before a script. Nothing that a script computes is changed; it is ended after its profiled
    steps. A trace needs no GPU. Exit code: 0 nothing found, 1 findings, 2 could not run.
    """
    from tilefit.rules import select

    selection = config.load(Path.cwd()).selection(selection)
    # Whatever can be wrong without a run is found before it.
    select(selection.select, selection.ignore)
    if gpu is not None:
        gpus.get(gpu)
    if arguments and not is_script(target):
        raise UsageError(
            f"unexpected argument {arguments[0]!r}", hint="Only a script (train.py) has arguments of its own."
        )
    judged: dict[str, Any] = {"gpu": gpu, "calibration": calibration, "selection": selection}
    run, error = _run(context, target, arguments or [], options, {**asdict(window), **judged})
    document = run.report
    shown.show(document)
    if export is not None:
        run.export(export)
        print(f"Trace written to {export}; open it in ui.perfetto.dev", file=sys.stderr)
    if error is not None:
        raise error
    return document.exit_code


def _run(
    context: typer.Context,
    target: str,
    arguments: list[str],
    options: TargetOptions,
    how: dict[str, Any],
) -> tuple[Imported | Profile, TilefitError | None]:
    """The run that is meant, and how a script ended after its profiled steps."""
    steps = [each.name for each in fields(Window)]
    if _is_trace(target):
        refuse_given(context, (*_OF_MODELS, *steps), "a trace tells which steps it is of")
        from tilefit.profiling.imported import Imported

        with output.progress(f"Reading {target}"):
            return Imported(Path(target), **{name: how[name] for name in how.keys() - {*steps}}), None
    if is_script(target):
        refuse_given(context, _OF_MODELS, "a script makes its own steps")
        step_options.note_misplaced(context, target, arguments)
        run, error = _script(Path(target), arguments, **how)
        if error is not None and not run.profiled:
            raise error
        return run, error
    if ":" not in target:
        raise UsageError(
            "neither a model, a script nor a trace",
            where=target,
            hint="A model is file.py:factory or hf:gpt2, a script ends in .py, a trace in .json or .json.gz.",
        )
    require_readable(target)
    from tilefit.profiling.target import profile_target

    with output.progress(f"Profiling {target}"):
        return profile_target(target, options, **how), None


def _script(script: Path, arguments: list[str], **how: Any) -> tuple[Profile, TilefitError | None]:
    if not script.is_file():
        raise UsageError("there is no such file", where=str(script), hint="Name a Python script.")
    from tilefit.capture.script import run_script
    from tilefit.profiling.session import Profile, require_gpu

    require_gpu()
    run = Profile(name=script.name, optimizer_steps=True, **how)
    return run, run_script(script, arguments, run)
