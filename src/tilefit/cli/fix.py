"""``tilefit fix``: from a model to changes that are proven, priced, and written where you want them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.local_gpu import local_gpu, predicted_gpu
from tilefit.cli.option_groups import Group, given, grouped
from tilefit.errors import UsageError
from tilefit.options import Selection

if TYPE_CHECKING:
    from tilefit.cost.priced import PricedGpu
    from tilefit.fixes.outcome import Outcome

Level = Literal["safe", "unsafe"]

_FIXES = "Fixes"
_OUTPUT = "Output"
_Fixes = Annotated[
    Selection,
    Group(
        _FIXES,
        help={
            "select": "Only these: codes of rules or their beginnings, or names of fixes; repeat or separate "
            "by commas.",
            "ignore": "Not these.",
            "min_gain": "Smallest gain worth a change, as a share of the step.",
        },
    ),
]


@grouped
def fix(
    context: typer.Context,
    target: step_options.Target,
    *,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU to plan for. Default: the one in this machine.")
    ] = None,
    calibration: CalibrationFile = None,
    options: step_options.Options,
    timeout: step_options.Timeout = step_options.TIMEOUT_S,
    fresh: step_options.Fresh = False,
    level: Annotated[
        Level,
        typer.Option(
            help="safe: the same function. unsafe: also what may change training, checkpoints or rounding.",
            rich_help_panel=_FIXES,
        ),
    ] = "safe",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Prove each fix in fp64: outputs, gradients, optimizer steps.",
            rich_help_panel=_FIXES,
        ),
    ] = True,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure each fix on this machine's GPU, and leave out what is no gain there.",
            rich_help_panel=_FIXES,
        ),
    ] = False,
    selection: _Fixes,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Print what --write would change, as a patch.", rich_help_panel=_OUTPUT),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Change your files.", rich_help_panel=_OUTPUT)
    ] = False,
    output_format: Annotated[
        report_output.Format | None,
        typer.Option(
            metavar="FORMAT",
            help="text, json or markdown; concise, html, sarif, github and junit show the findings, as "
            "tilefit check does; default: by the ending of the file, else text.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    output_file: report_output.OutputFile = None,
) -> int:
    """Fix a model: what to change, what each change saves, and the proof that it is the same model.

    Without --write nothing is changed. Exit code: 0 nothing to do, 1 fixes found, 2 could not run.
    """
    settled = config.load(Path.cwd())
    if diff and (write or output_format not in (None, "text") or output_file):
        raise UsageError("--diff prints a patch and nothing else", hint="Leave out the other option.")
    device = _gpu(gpu, settled.gpu, measure, calibration)
    if (diff or write) and target.partition(":")[0] in ("hf", "torchvision", "timm"):
        raise UsageError(
            f"{target} is a library's model: there is no source of yours to change",
            hint="Leave out --diff and --write, or give the file of yours that builds it: file.py:factory.",
        )

    from tilefit.session.fixing import FixRequest, FixSession

    request = FixRequest(
        target=target,
        options=options,
        gpu=device,
        selection=settled.selection(selection),
        level=level,
        verify=verify,
        measure=measure,
        own_optimizer=options.train
        and not any(given(context, name) for name in ("optimizer", "fused_optimizer")),
        timeout_s=timeout,
        fresh=fresh,
    )
    session = FixSession(request, _stage)
    outcome = session.outcome(source_wanted=diff or write)
    if write:
        outcome = replace(outcome, written=outcome.patches.write())
    if diff:
        _print_diff(outcome)
        return bool(outcome.patches.made)
    report_output.show(outcome, output_format, output_file, trimmed=False)
    return outcome.exit_code


def _gpu(name: str | None, settled: tuple[str, ...], measure: bool, calibration: Path | None) -> PricedGpu:
    """The one GPU that is planned for."""
    from tilefit.cost.priced import resolve

    if measure:
        return predicted_gpu(name, local_gpu(), calibration)
    device, *others = resolve(name or settled or None, calibration)
    if others:
        raise UsageError("a plan is made for one GPU", hint=f"Name one: --gpu {device.name}.")
    return device


@contextmanager
def _stage(message: str) -> Iterator[None]:
    """Show what is done; what the user's program prints meanwhile is no output of ours."""
    with output.progress(message), redirect_stdout(sys.stderr):
        yield


def _print_diff(outcome: Outcome) -> None:
    """The patch on stdout, byte for byte; what is not in it on stderr."""
    from rich.console import Console

    from tilefit.fixes.outcome import beside_diff, colored

    text = outcome.patches.diff()
    console = output.stdout()
    if console.is_terminal:
        console.print(colored(text.decode(errors="replace")), soft_wrap=True, end="")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
    Console(stderr=True, highlight=False).print(beside_diff(outcome), crop=False)
