"""The options that say which step of which model is looked at: the same for every command with a TARGET."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit.errors import UsageError

if TYPE_CHECKING:
    from tilefit.capture.child import CaptureOptions

Amp = Literal["bf16", "fp16", "off"]
Optimizer = Literal["adamw", "sgd", "none"]

_STEP = "The step"
_RULES = "Rules"
#: Options that split the step over several GPUs.
SPLIT = "Split over GPUs"

#: Seconds a capture may take before it counts as hanging.
TIMEOUT_S = 300.0

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="file.py:factory, package.module:factory, hf:gpt2 (or hf:config.json), "
        "torchvision:resnet50, timm:vit_base_patch16_224.",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SPEC",
        help='An input, such as "input_ids: int64[16,1024]"; repeat.',
        rich_help_panel=_STEP,
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples.", rich_help_panel=_STEP)]
Seq = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens per sample.", rich_help_panel=_STEP)
]
ImageSize = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Height and width of an image.", rich_help_panel=_STEP),
]
Train = Annotated[
    bool,
    typer.Option("--train/--infer", help="Training step or forward pass alone.", rich_help_panel=_STEP),
]
Precision = Annotated[Amp, typer.Option(help="Mixed precision by autocast.", rich_help_panel=_STEP)]
Tf32 = Annotated[
    bool | None,
    typer.Option(
        "--tf32/--no-tf32", help="fp32 products in TF32; default as in PyTorch.", rich_help_panel=_STEP
    ),
]
OptimizerName = Annotated[
    Optimizer, typer.Option(help="Optimizer of the training step.", rich_help_panel=_STEP)
]
FusedOptimizer = Annotated[
    bool, typer.Option("--fused-optimizer", help="As with fused=True.", rich_help_panel=_STEP)
]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="Model and images in NHWC.", rich_help_panel=_STEP)
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Price the fusion of torch.compile.", rich_help_panel=_STEP)
]
OnCpu = Annotated[
    bool,
    typer.Option(
        "--on-cpu", help="Capture with real data, for code that depends on values.", rich_help_panel=_STEP
    ),
]
TensorParallel = Annotated[
    int, typer.Option(min=1, metavar="N", help="GPUs that share each layer.", rich_help_panel=SPLIT)
]
PipelineParallel = Annotated[
    int, typer.Option(min=1, metavar="N", help="Stages, each a part of the layers.", rich_help_panel=SPLIT)
]
DataParallel = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Replicas, each with a part of the batch.", rich_help_panel=SPLIT),
]
MicroBatches = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Parts of a replica's batch; default: as many as stages.",
        show_default=False,
        rich_help_panel=SPLIT,
    ),
]
Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="Longest capture.", rich_help_panel=_STEP)
]
Ignore = Annotated[
    list[str] | None, typer.Option(metavar="CODE", help="Not these rules.", rich_help_panel=_RULES)
]
MinGain = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        metavar="SHARE",
        help="Smallest gain worth a finding, as a share of the step.",
        rich_help_panel=_RULES,
    ),
]


def given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Options that would have no effect are not ignored.

    Raises:
        UsageError: one of them was given; says ``why`` it is of no use.
    """
    for name in names:
        if given(context, name):
            raise UsageError(f"{spelled(name)} has no effect: {why}", hint="Leave it out.")


def refuse_optimizer(context: typer.Context) -> None:
    """Refuse what is said of an optimizer where none runs.

    Raises:
        UsageError: something is.
    """
    if context.params["optimizer"] == "none":  # with --infer it says the same
        refuse(context, ["fused_optimizer"], "--optimizer none runs no optimizer")
    elif not context.params["train"]:
        refuse(context, ("optimizer", "fused_optimizer"), "--infer runs no optimizer")


def capture_options(context: typer.Context) -> CaptureOptions:
    """How the step is to be captured, as the options of a command say.

    Raises:
        UsageError: one of them would have no effect.
    """
    from tilefit.capture.child import CaptureOptions

    refuse_optimizer(context)
    asked = context.params
    same = ("batch", "seq", "image_size", "train", "tf32", "optimizer", "fused_optimizer", "channels_last")
    return CaptureOptions(
        inputs=tuple(asked["input"] or ()),
        amp="" if asked["amp"] == "off" else asked["amp"],
        compiled=asked["compile"],
        on_cpu=asked.get("on_cpu", False),
        **{name: asked[name] for name in same},
    )


def spelled(name: str) -> str:
    """An option as it is written: ``--image-size``."""
    return f"--{name.replace('_', '-')}"


def note_misplaced(context: typer.Context, script: str, arguments: Sequence[str]) -> None:
    """Say so where a script is given what looks like an option of ours: both may have meant it."""
    ours = {name for parameter in context.command.params for name in parameter.opts}
    for name in dict.fromkeys(argument.partition("=")[0] for argument in arguments):
        if name.startswith("--") and name in ours:
            print(f"{name} went to {script}; options of tilefit stand before the script", file=sys.stderr)


def codes(values: list[str] | None) -> tuple[str, ...]:
    """What a repeatable, comma-separated option lists."""
    return tuple(code.strip() for value in values or () for code in value.split(",") if code.strip())
