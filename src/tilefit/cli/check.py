"""``tilefit check``: from a model to ranked, priced findings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibration_option import CalibrationFile, Libraries
from tilefit.cli.completion import gpu_option
from tilefit.cli.option_groups import grouped

#: More take over half a minute to look at, at 0.3 ms each (2 CPU cores).
_MANY_OPS = 100_000


@grouped
def check(
    context: typer.Context,
    target: step_options.TargetOrProgram,
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
) -> int:
    """Check a model, or a program: what a step costs on a GPU, where it wastes it, what a change saves.

    A program's own arguments stand after --. Nothing is downloaded and no GPU is needed. Exit code: 0
    nothing found, 1 findings, 2 could not run.
    """
    is_program = step_options.refuse_of_others(context, target, program)
    from tilefit.cost.priced import resolve, with_libraries
    from tilefit.rules import select

    settled = config.load(Path.cwd())
    selection = settled.selection(selection)
    # Whatever can be wrong without the model is found before the model is loaded.
    select(selection.select, selection.ignore)
    found = resolve(gpu or settled.gpu or None, calibration)
    gpus = tuple(with_libraries(device, libraries) for device in found)

    from tilefit.capture.child import capture_in_child, capture_program_in_child
    from tilefit.session import Session

    captured = partial(capture_in_child, target, options, capture.timeout, fresh=capture.fresh)
    if is_program:
        program = replace(program, program=target, arguments=tuple(arguments or ()))
    with output.progress(f"{'Running' if is_program else 'Capturing'} {target}") as tell:
        if is_program:
            run = partial(capture_program_in_child, program, gpus[0].name)
            captured = partial(run, capture.timeout, tell)
        session = Session(captured, gpus, selection, split)
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
