"""``tilefit check``: from a model to ranked, priced findings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tilefit.capture.naming import require_readable
from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile, Libraries
from tilefit.cli.completion import gpu_option
from tilefit.cli.option_groups import grouped
from tilefit.errors import TilefitError, UsageError
from tilefit.options import ProgramOptions

if TYPE_CHECKING:
    from tilefit.session import Session

#: Seconds between two looks at the files that are watched.
_LOOK_S = 0.5
#: More take over half a minute to look at, at 0.3 ms each (2 CPU cores).
_MANY_OPS = 100_000


@grouped
def check(
    context: typer.Context,
    target: step_options.Target,
    arguments: step_options.Arguments = None,
    *,
    gpu: Annotated[
        list[str] | None,
        gpu_option("GPU to check for; repeat to compare. Default: the one in this machine."),
    ] = None,
    calibration: CalibrationFile = None,
    libraries: Libraries = "",
    options: step_options.Options,
    split: step_options.SplitOver,
    capture: step_options.Capture,
    program: step_options.OfProgram,
    selection: step_options.Rules,
    shown: report_output.Shown,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Check again whenever a Python, TOML or JSON file below this folder changes.",
            rich_help_panel=report_output.PANEL,
        ),
    ] = False,
) -> int:
    """Check a model, or a program: what a step costs on a GPU, where it wastes it, what a change saves.

    Behind a model stand more models, behind a program and -- its own arguments. Nothing is downloaded and no
    GPU is needed. Exit code: 0 nothing found, 1 findings, 2 could not run.
    """
    how = step_options.asked(context, target, options, program, arguments, several=True)
    is_program = isinstance(how, ProgramOptions)
    targets = (target,) if is_program else (target, *(arguments or ()))
    for each in targets[1:]:
        require_readable(each)
    if len(targets) > 1 and shown.output_file:
        raise UsageError(
            "one file cannot hold several targets", where="--output-file", hint="Check each alone."
        )
    from tilefit.cost.priced import resolve, with_libraries
    from tilefit.rules import select

    settled = config.load(Path.cwd())
    selection = settled.selection(selection)
    # Whatever can be wrong without the model is found before the model is loaded.
    select(selection.select, selection.ignore)
    found = resolve(gpu or settled.gpu or None, calibration)
    gpus = tuple(with_libraries(device, libraries) for device in found)

    from tilefit.capture.child import capture_in_child
    from tilefit.session import Session

    def checked(target: str) -> int:
        captured = partial(capture_in_child, target, how, capture.timeout, fresh=capture.fresh)
        with output.progress(f"{'Running' if is_program else 'Capturing'} {target}") as tell:
            captured = partial(captured, gpu=gpus[0].name, told=tell)
            session = Session(captured, gpus, selection, split)
            session.step  # noqa: B018 - captured now
        return _shown(session, shown)

    return max(map(checked, targets)) if not watch else _watch(checked, targets)


def _watch(checked: Callable[[str], int], targets: Sequence[str]) -> NoReturn:
    """Check the targets again and again, whenever a file changes."""
    while True:
        before = _stamps(Path.cwd())
        for each in targets:
            try:
                checked(each)
            except TilefitError as error:
                print(f"error: {error}", file=sys.stderr)
        output.note("waiting for a change; Ctrl-C ends")
        while _stamps(Path.cwd()) == before:
            sleep(_LOOK_S)


def _shown(session: Session, shown: report_output.Destination) -> int:
    """Look for waste in what was captured, and show it; the exit code."""
    step = session.step
    if len(step.ops) > _MANY_OPS:
        output.note(
            f"the step has {len(step.ops):,} operations, as a loop over tokens or time steps makes them: "
            "looking for waste takes minutes; a shorter input (--seq) takes less"
        )
    with output.progress(f"Looking for waste in {len(step.ops):,} operations"):
        document = session.report
    shown.show(document)
    return document.exit_code


def _stamps(folder: Path) -> dict[str, int]:
    """When each file was changed that a check may depend on; what begins with a dot is left out."""
    found = {}
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in files:
            if name.endswith((".py", ".toml", ".json")):
                path = os.path.join(here, name)
                with suppress(OSError):  # gone since
                    found[path] = os.stat(path).st_mtime_ns
    return found
