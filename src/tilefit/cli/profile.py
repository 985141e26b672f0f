"""``tilefit profile``: what a real run spends its time on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibrated_profile import ProfileFile
from tilefit.cli.step_options import codes
from tilefit.errors import TilefitError, UsageError

if TYPE_CHECKING:
    from tilefit.profiling.session import Profile

_RUN = "The run"
_TRACES = (".json", ".json.gz")
#: Options that describe the step of a model, and those that choose the steps of a run.
_OF_MODELS = (
    *("input", "batch", "seq", "image_size", "train", "amp", "tf32"),
    *("optimizer", "fused_optimizer", "channels_last", "compile"),
)
_OF_RUNS = ("steps", "skip", "plain")


class ProfileCommand(TyperCommand):
    """What stands behind a script is the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(_is_script(each) for each in args):
            ctx.allow_interspersed_args = False
        return super().parse_args(ctx, args)


def _is_script(text: str) -> bool:
    return text.endswith(".py")


def _is_trace(text: str) -> bool:
    return text.endswith(_TRACES) and not text.startswith("hf:")


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
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="GPU that rates are compared with. Default: the one in this machine, or the trace's.",
        ),
    ] = None,
    profile: ProfileFile = None,
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Steps to profile.", rich_help_panel=_RUN)
    ] = 3,
    skip: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Steps before anything is measured. A script's step is one of its optimizer; with --skip 0 "
            "--plain 0 profiling begins with the script.",
            rich_help_panel=_RUN,
        ),
    ] = 5,
    plain: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Steps then timed without the profiler, to tell what it adds.",
            rich_help_panel=_RUN,
        ),
    ] = 5,
    input: step_options.Inputs = None,
    batch: step_options.Batch = None,
    seq: step_options.Seq = None,
    image_size: step_options.ImageSize = None,
    train: step_options.Train = True,
    amp: step_options.Precision = "off",
    tf32: step_options.Tf32 = None,
    optimizer: step_options.OptimizerName = "adamw",
    fused_optimizer: step_options.FusedOptimizer = False,
    channels_last: step_options.ChannelsLast = False,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Compile the model with torch.compile.", rich_help_panel="The step"),
    ] = False,
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE",
            help="Only these rules, by code or its beginning; repeat or separate by commas.",
            rich_help_panel="Rules",
        ),
    ] = None,
    ignore: step_options.Ignore = None,
    min_gain: step_options.MinGain = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the trace with the findings, for ui.perfetto.dev; .json or .json.gz.",
            rich_help_panel=report_output.PANEL,
        ),
    ] = None,
    show_all: report_output.ShowAll = False,
    ops: report_output.Operations = False,
    output_format: report_output.OutputFormat = None,
    output_file: report_output.OutputFile = None,
) -> int:
    """Profile a run: which operation, module and line the GPU's time goes to, and what to change.

    Options go before a script. Nothing that a script computes is changed; it is ended after its profiled
    steps. A trace needs no GPU. Exit code: 0 nothing found, 1 findings, 2 could not run.
    """
    from tilefit.checker import MIN_GAIN
    from tilefit.cost.priced import resolve
    from tilefit.rules import select as select_rules

    settled = config.load(Path.cwd())
    rules: dict[str, Any] = {
        "select": codes(select) or settled.select,
        "ignore": (*settled.ignore, *codes(ignore)),
        "min_gain": next(gain for gain in (min_gain, settled.min_gain, MIN_GAIN) if gain is not None),
        "per_module_ignores": settled.per_module_ignores,
    }
    # Whatever can be wrong without a run is found before it.
    select_rules(rules["select"], rules["ignore"])
    if gpu is not None or profile is not None:
        resolve(gpu, profile)
    if arguments and not _is_script(target):
        raise UsageError(
            f"unexpected argument {arguments[0]!r}", hint="Only a script (train.py) has arguments of its own."
        )
    error: TilefitError | None = None
    if _is_trace(target):
        step_options.refuse(context, (*_OF_MODELS, *_OF_RUNS), "a trace tells which steps it is of")
        from tilefit.profiling.imported import Imported

        with output.progress(f"Reading {target}"):
            run: Imported | Profile = Imported(Path(target), gpu, profile, **rules)
            document = run.report
    elif _is_script(target):
        step_options.refuse(context, _OF_MODELS, "a script makes its own steps")
        step_options.note_misplaced(context, target, arguments or ())
        run, error = _script(Path(target), list(arguments or ()), gpu, profile, steps, skip, plain, rules)
        if error is not None and not run.profiled:
            raise error
        document = run.report
    elif ":" not in target:
        raise UsageError(
            "neither a model, a script nor a trace",
            where=target,
            hint="A model is file.py:factory or hf:gpt2, a script ends in .py, a trace in .json or .json.gz.",
        )
    else:
        from tilefit.profiling.target import profile_target

        options = step_options.capture_options(context)
        with output.progress(f"Profiling {target}"):
            run = profile_target(
                target, options, gpu=gpu, calibration=profile, steps=steps, skip=skip, plain=plain, **rules
            )
            document = run.report
    report_output.show(document, output_format, output_file, show_all=show_all, ops=ops)
    if export is not None:
        run.export(export)
        print(f"Trace written to {export}; open it in ui.perfetto.dev", file=sys.stderr)
    if error is not None:
        raise error
    return document.exit_code


def _script(
    script: Path,
    arguments: list[str],
    gpu: str | None,
    calibration: Path | None,
    steps: int,
    skip: int,
    plain: int,
    rules: dict[str, Any],
) -> tuple[Profile, TilefitError | None]:
    if not script.is_file():
        raise UsageError("there is no such file", where=str(script), hint="Name a Python script.")
    from tilefit.precision.script import run_script
    from tilefit.profiling.session import Profile, require_gpu

    require_gpu()
    run = Profile(
        steps=steps,
        skip=skip,
        plain=plain,
        gpu=gpu,
        calibration=calibration,
        name=script.name,
        optimizer_steps=True,
        **rules,
    )
    return run, run_script(script, arguments, run)
