"""``tilefit precision``: watch a training script for a while, and say what is wrong with it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tilefit.cli import report_output, step_options
from tilefit.cli.option_groups import Group, grouped, refuse_given
from tilefit.errors import TargetError, UsageError
from tilefit.options import option

if TYPE_CHECKING:
    from tilefit.report.watched import Watched


@dataclass(frozen=True)
class Looks:
    """How long a script is watched, and how closely."""

    steps: int = option(100, "End the script after this many steps of its optimizer.", min=1, metavar="N")
    every: int = option(
        25, "Look closely at one step in this many, after the first four.", min=1, metavar="N"
    )
    numerics: bool = option(True, "Look closely at all, or keep the books alone.", "--numerics/--no-numerics")
    find_non_finite: bool = option(False, "Check every operation for inf and NaN; slow.")
    strict: bool = option(False, "Notes count as findings too, for the exit code.")


@grouped
def precision(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A training script, run as it is.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Its own arguments.", show_default=False),
    ] = None,
    *,
    looks: Annotated[Looks, Group("Options")],
    selection: step_options.Codes,
    shown: report_output.ShownWhole,
) -> int:
    """Watch a training script: is its mixed precision silently wrong? Options go before the script.

    The script runs as it is, with its output on stderr, and is ended after some steps. Nothing it computes is
    changed. Ctrl-C ends it too, with what was found until then. Exit code: 0 nothing found, or notes alone,
    1 errors or warnings, 2 could not run. Under torchrun, findings leave it 0: it is the launcher's.
    """
    if not script.is_file():
        raise UsageError("there is no such file", where=str(script), hint="Name a Python script.")
    if not looks.numerics:
        refuse_given(context, ("every", "find_non_finite"), "--no-numerics looks at no step closely")
    if looks.find_non_finite:
        refuse_given(context, ["every"], "--find-non-finite looks at every step")
    step_options.note_misplaced(context, str(script), arguments or ())
    from tilefit.capture.script import run_script
    from tilefit.precision.watching import Watch

    watch = Watch(
        every=looks.every,
        numerics=looks.numerics,
        steps=looks.steps,
        find_non_finite=looks.find_non_finite,
        select=selection.select,
        ignore=selection.ignore,
    )

    def stuck() -> NoReturn:
        watch.stop()
        code = _show(watch.report(script.name), shown, strict=looks.strict)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    interrupted, error = False, None
    try:
        error = run_script(script, list(arguments or ()), watch, stuck)
    except KeyboardInterrupt:
        interrupted = True
    if error is None and not watch.steps and not interrupted:
        error = TargetError(
            "no optimizer made a step",
            where=str(script),
            hint="Watch a script that trains with a torch.optim optimizer, for long enough to make a step. "
            "Processes that it starts are not watched: start them with torchrun.",
        )
    code = 0
    if watch.alarms or (error is None and watch.steps):
        code = _show(watch.report(script.name), shown, strict=looks.strict)
    if interrupted:
        raise KeyboardInterrupt
    if error is not None:
        raise error
    return code


def _show(document: Watched, shown: report_output.Destination, *, strict: bool) -> int:
    """Show what was found; the exit code. One rank speaks for all: what ranks disagree on, it knows."""
    first = os.environ.get("RANK", "0") == "0"
    if first:
        shown.show(document)
    # A launcher takes every other code for a crash, and says so over the report.
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    code = int(bool(document.findings)) if strict else document.exit_code
    return code if first and not launched else 0
