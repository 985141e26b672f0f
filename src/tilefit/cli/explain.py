"""``tilefit explain``: a short lesson on an operation, a layer or a finding, on the user's own sizes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.commands import Command
from tilefit.cli.completion import GpuName
from tilefit.cli.option_groups import grouped, refuse_given
from tilefit.errors import UsageError
from tilefit.options import ProgramOptions, Selection, TargetOptions


class _Command(Command):
    """What stands behind ``--`` is the program's, although nothing says what to explain."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:place])
        if place < len(args):
            ctx.params["arguments"] = [*(ctx.params["arguments"] or ()), *args[place + 1 :]]
            ctx.set_parameter_source("arguments", ctx.get_parameter_source("target"))
        return rest


SETTINGS = {"cls": _Command}


@grouped
def explain(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET|PROGRAM|FILE",
            help=f"{step_options.TARGETS}; or a program, train.py; or a report, run.json.",
            show_default=False,
        ),
    ],
    what: Annotated[
        str | None,
        typer.Argument(
            help="A finding (ALN002), a module (lm_head), a kind (gemm) or an operation (#12); "
            "default: what takes the most time.",
            show_default=False,
        ),
    ] = None,
    arguments: step_options.Arguments = None,
    *,
    gpu: GpuName = None,
    calibration: CalibrationFile = None,
    options: step_options.Options,
    capture: step_options.Capture,
    program: step_options.OfProgram,
) -> None:
    """Teach what a part of a step costs and why: work, bytes, tiles, waves, with the arithmetic in steps.

    Exit code: 0 explained, 2 could not run.
    """
    if what == "":
        raise UsageError("WHAT is empty", hint="Leave it out for what takes the most time.")
    from tilefit.report import Report, explain, load

    if Path(target).suffix == ".json" and ":" not in target:
        reports = load(target, note=output.note).reports
        chosen = [each for each in reports if gpu in (None, each.gpu)]
        if len(chosen) != 1 or not isinstance(chosen[0], Report):
            known = ", ".join(each.gpu for each in reports)
            which = f"no single report for --gpu {gpu}" if gpu else f"{len(reports)} reports"
            raise UsageError(f"holds {which}", where=target, hint=f"Name one GPU of it: {known or 'none'}.")
        names = [each.name for kind in (TargetOptions, ProgramOptions) for each in fields(kind)]
        refuse_given(context, names, "the report is made")
        report = chosen[0]
    else:
        from functools import partial

        from tilefit.capture.child import capture_in_child
        from tilefit.cost.priced import resolve
        from tilefit.session import Session

        how = step_options.asked(context, target, options, program, arguments)
        settled = config.load(Path.cwd())
        gpus = resolve(gpu or settled.gpu[:1] or None, calibration)
        captured = partial(capture_in_child, target, how, capture.timeout, fresh=capture.fresh)
        with output.progress(f"Capturing {target}") as tell:
            captured = partial(captured, gpu=gpus[0].name, told=tell)
            report = Session(captured, gpus, settled.selection(Selection())).assessments[0].report
    report_output.show(explain(report, what or ""), "text", None)
