"""``tilefit check``: from a model to ranked, priced findings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibrated_profile import ProfileFile
from tilefit.cli.step_options import codes

_RULES = "Rules"
#: More take over half a minute to look at, at 0.3 ms each (2 CPU cores).
_MANY_OPS = 100_000


def check(
    context: typer.Context,
    target: step_options.Target,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="GPU to check for; repeat to compare. Default: the one in this machine."
        ),
    ] = None,
    profile: ProfileFile = None,
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
    compile: step_options.Compile = False,
    on_cpu: step_options.OnCpu = False,
    tensor_parallel: step_options.TensorParallel = 1,
    pipeline_parallel: step_options.PipelineParallel = 1,
    data_parallel: step_options.DataParallel = 1,
    micro_batches: step_options.MicroBatches = 0,
    timeout: step_options.Timeout = step_options.TIMEOUT_S,
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE",
            help="Only these rules, by code or its beginning; repeat or separate by commas.",
            rich_help_panel=_RULES,
        ),
    ] = None,
    ignore: step_options.Ignore = None,
    min_gain: step_options.MinGain = None,
    show_all: report_output.ShowAll = False,
    ops: report_output.Operations = False,
    output_format: report_output.OutputFormat = None,
    output_file: report_output.OutputFile = None,
) -> int:
    """Check a model: what a step costs on a GPU, where it wastes it, what to change and what that saves.

    Nothing is downloaded and no GPU is needed. Exit code: 0 nothing found, 1 findings, 2 could not run.
    """
    from tilefit.checker import MIN_GAIN, assess
    from tilefit.cost.priced import resolve
    from tilefit.parallel import Split, plan, rank_step
    from tilefit.rules import select as select_rules

    settled = config.load(Path.cwd())
    wanted = codes(select) or settled.select
    unwanted = (*settled.ignore, *codes(ignore))
    # Whatever can be wrong without the model is found before the model is loaded.
    select_rules(wanted, unwanted)
    devices = resolve(gpu or settled.gpu or None, profile)

    from tilefit.capture.child import capture_in_child

    options = step_options.capture_options(context)
    with output.progress(f"Capturing {target}"):
        step = capture_in_child(target, options, timeout)
    split = Split(tensor_parallel, pipeline_parallel, data_parallel, micro_batches)
    if not split.is_trivial:
        step = rank_step(plan(step, split), devices)
    if len(step.ops) > _MANY_OPS:
        output.note(
            f"the step has {len(step.ops):,} operations, as a loop over tokens or time steps makes them: "
            "looking for waste takes minutes; a shorter input (--seq) takes less"
        )
    with output.progress(f"Looking for waste in {len(step.ops):,} operations"):
        document = assess(
            step,
            devices,
            select=wanted,
            ignore=unwanted,
            min_gain=next(gain for gain in (min_gain, settled.min_gain, MIN_GAIN) if gain is not None),
            per_module_ignores=settled.per_module_ignores,
        )

    report_output.show(document, output_format, output_file, show_all=show_all, ops=ops)
    return document.exit_code
