"""``tilefit check``: from a model to ranked, priced findings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tilefit.cli import config, output

Amp = Literal["bf16", "fp16", "off"]
Optimizer = Literal["adamw", "sgd", "none"]
Format = Literal["text", "concise", "json", "markdown"]

_STEP = "The step"
_RULES = "Rules"
_OUTPUT = "Output"

#: Seconds a capture may take before it counts as hanging.
TIMEOUT_S = 300.0


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:factory, package.module:factory, hf:gpt2 (or hf:config.json), "
            "torchvision:resnet50, timm:vit_base_patch16_224.",
            show_default=False,
        ),
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="GPU to check for; repeat to compare. Default: the one in this machine."
        ),
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help='An input, such as "input_ids: int64[16,1024]"; repeat.',
            rich_help_panel=_STEP,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples.", rich_help_panel=_STEP)
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens per sample.", rich_help_panel=_STEP)
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Height and width of an image.", rich_help_panel=_STEP),
    ] = None,
    train: Annotated[
        bool,
        typer.Option("--train/--infer", help="Training step or forward pass alone.", rich_help_panel=_STEP),
    ] = True,
    amp: Annotated[Amp, typer.Option(help="Mixed precision by autocast.", rich_help_panel=_STEP)] = "off",
    tf32: Annotated[
        bool | None,
        typer.Option(
            "--tf32/--no-tf32", help="fp32 products in TF32; default as in PyTorch.", rich_help_panel=_STEP
        ),
    ] = None,
    optimizer: Annotated[
        Optimizer, typer.Option(help="Optimizer of the training step.", rich_help_panel=_STEP)
    ] = "adamw",
    fused_optimizer: Annotated[
        bool, typer.Option("--fused-optimizer", help="As with fused=True.", rich_help_panel=_STEP)
    ] = False,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Model and images in NHWC.", rich_help_panel=_STEP)
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Price the fusion of torch.compile.", rich_help_panel=_STEP)
    ] = False,
    on_cpu: Annotated[
        bool,
        typer.Option(
            "--on-cpu", help="Capture with real data, for code that depends on values.", rich_help_panel=_STEP
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Longest capture.", rich_help_panel=_STEP)
    ] = TIMEOUT_S,
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE",
            help="Only these rules, by code or its beginning; repeat or separate by commas.",
            rich_help_panel=_RULES,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Not these rules.", rich_help_panel=_RULES)
    ] = None,
    min_gain: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Smallest gain worth a finding, as a share of the step.",
            rich_help_panel=_RULES,
        ),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Every finding with all its arithmetic.", rich_help_panel=_OUTPUT)
    ] = False,
    ops: Annotated[
        bool, typer.Option("--ops", help="The operations too, by time.", rich_help_panel=_OUTPUT)
    ] = False,
    output_format: Annotated[
        Format,
        typer.Option(metavar="FORMAT", help="text, concise, json or markdown.", rich_help_panel=_OUTPUT),
    ] = "text",
    output_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write there instead of to stdout.", rich_help_panel=_OUTPUT),
    ] = None,
) -> int:
    """Check a model: what a step costs on a GPU, where it wastes it, what to change and what that saves.

    Nothing is downloaded and no GPU is needed. Exit code: 0 nothing found, 1 findings, 2 could not run.
    """
    from tilefit.checker import MIN_GAIN, assess, resolve
    from tilefit.rules import select as select_rules

    settled = config.load(Path.cwd())
    wanted = _codes(select) or settled.select
    unwanted = (*settled.ignore, *_codes(ignore))
    # Whatever can be wrong without the model is found before the model is loaded.
    select_rules(wanted, unwanted)
    devices = resolve(gpu or settled.gpu or None)

    from tilefit.capture.child import CaptureOptions, capture_in_child

    options = CaptureOptions(
        inputs=tuple(input or ()),
        batch=batch,
        seq=seq,
        image_size=image_size,
        train=train,
        amp="" if amp == "off" else amp,
        tf32=tf32,
        optimizer=optimizer,
        fused_optimizer=fused_optimizer,
        channels_last=channels_last,
        compiled=compile,
        on_cpu=on_cpu,
    )
    with output.progress(f"Capturing {target}"):
        step = capture_in_child(target, options, timeout)
    with output.progress("Looking for waste"):
        document = assess(
            step,
            devices,
            select=wanted,
            ignore=unwanted,
            min_gain=next(gain for gain in (min_gain, settled.min_gain, MIN_GAIN) if gain is not None),
            per_module_ignores=settled.per_module_ignores,
        )

    from tilefit.report import render
    from tilefit.report.terminal import Terminal

    console = output.stdout()
    if output_format == "text" and output_file is None and console.is_terminal:
        console.print(Terminal(document, show_all=show_all, ops=ops))
        return document.exit_code
    text = render(document, output_format, show_all=show_all, ops=ops, width=console.width)
    if output_file is None:
        print(text, end="")
    else:
        output.write_file(output_file, text)
    return document.exit_code


def _codes(values: list[str] | None) -> tuple[str, ...]:
    return tuple(code.strip() for value in values or () for code in value.split(",") if code.strip())
