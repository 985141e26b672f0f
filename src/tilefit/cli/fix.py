"""``tilefit fix``: from a model to changes that are proven, priced, and written where you want them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit import console
from tilefit.capture.naming import has_source
from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.completion import gpu_option
from tilefit.cli.local_gpu import local_gpu, predicted_gpu
from tilefit.cli.option_groups import Group, grouped
from tilefit.errors import UsageError
from tilefit.options import ProgramOptions, Selection, option

if TYPE_CHECKING:
    from tilefit.cost.priced import PricedGpu
    from tilefit.fixes.planning.outcome import Outcome

Level = Literal["safe", "unsafe"]

_FIXES = "Fixes"
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


_Shown = Annotated[
    report_output.Destination,
    report_output.only_whole(
        "text, json, markdown or html; concise, sarif, github and junit show the findings, as tilefit check "
        "does; default: by the ending of the file, else text."
    ),
]


@dataclass(frozen=True)
class FixOptions:
    """How fixes are chosen."""

    level: Level = option(
        "safe", "safe: the same function. unsafe: also what may change training, checkpoints or rounding."
    )
    verify: bool = option(
        True, "Prove each fix in fp64: outputs, gradients, optimizer steps.", "--verify/--no-verify"
    )
    measure: bool = option(
        False, "Measure each fix on this machine's GPU, and leave out what is no gain there."
    )
    memory_budget: float | None = option(
        None,
        "GiB that the tensors of a step may take: what does not fit computes modules again in its backward "
        "pass. Default: what fits the GPU.",
        metavar="GIB",
        min=0.0,
    )


#: Options of what is done at run time, to a model.
_OF_RUN_TIME = ("verify", "measure", "memory_budget")


@dataclass(frozen=True)
class FileOptions:
    """What becomes of the user's files."""

    diff: bool = option(False, "Print what --write would change, as a patch.")
    write: bool = option(False, "Change your files.")


@grouped
def fix(
    context: typer.Context,
    target: step_options.Target,
    arguments: step_options.Arguments = None,
    *,
    gpu: Annotated[str | None, gpu_option("GPU to plan for. Default: the one in this machine.")] = None,
    calibration: CalibrationFile = None,
    options: step_options.Options,
    capture: step_options.Capture,
    program: step_options.OfProgram,
    ways: Annotated[FixOptions, Group(_FIXES)],
    selection: _Fixes,
    files: Annotated[FileOptions, Group(report_output.PANEL)],
    shown: _Shown,
) -> int:
    """Fix a model, or a program: what to change, what each change saves, the proof that it is the same model.

    Without --write nothing is changed. Exit code: 0 nothing to do, 1 fixes found, 2 could not run.
    """
    how = step_options.asked(context, target, options, program, arguments, of_models=_OF_RUN_TIME)
    is_program = isinstance(how, ProgramOptions)
    settled = config.load(Path.cwd())
    if files.diff and (files.write or shown.output_format not in (None, "text") or shown.output_file):
        raise UsageError("--diff prints a patch and nothing else", hint="Leave out the other option.")
    device = _gpu(gpu, settled.gpu, ways.measure, calibration)
    if (files.diff or files.write) and not (is_program or has_source(target)):
        raise UsageError(
            f"{target} is a library's model: there is no source of yours to change",
            hint="Leave out --diff and --write, or give the file of yours that builds it: file.py:factory.",
        )

    from tilefit.session.fixing import FixRequest, FixSession, ProgramFixSession

    request = FixRequest(
        target=target,
        options=options,
        gpu=device,
        selection=settled.selection(selection),
        level=ways.level,
        verify=ways.verify,
        measure=ways.measure,
        memory_bytes=None if ways.memory_budget is None else ways.memory_budget * 2**30,
        timeout_s=capture.timeout,
        fresh=capture.fresh,
        program=how if isinstance(how, ProgramOptions) else None,
    )
    session = (ProgramFixSession if is_program else FixSession)(request, _stage)
    outcome = session.outcome(source_wanted=files.diff or files.write)
    if files.write:
        outcome = replace(outcome, written=outcome.patches.write())
    if files.diff:
        _print_diff(outcome)
        return bool(outcome.patches.made)
    shown.show(outcome, trimmed=False)
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
def _stage(message: str) -> Iterator[Callable[[str], None]]:
    """Show what is done; what the user's program prints meanwhile is no output of ours."""
    with output.progress(message) as say, redirect_stdout(sys.stderr):
        yield say


def _print_diff(outcome: Outcome) -> None:
    """The patch on stdout, byte for byte; what is not in it on stderr."""
    from tilefit.fixes.planning.outcome import beside_diff, colored

    text = outcome.patches.diff()
    stdout = output.stdout()
    if stdout.is_terminal:
        stdout.print(colored(text.decode(errors="replace")), soft_wrap=True, end="")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
    console.console(stderr=True).print(beside_diff(outcome), crop=False)
