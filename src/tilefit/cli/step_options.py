"""The options that every command with a TARGET has: the step, the split, the rules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from tilefit.capture.naming import require_program, require_readable
from tilefit.cli.commands import Command
from tilefit.cli.option_groups import Group, refuse_given
from tilefit.options import ProgramOptions, Selection, Split, StepOptions, TargetOptions, option

_STEP = "The step"
_RULES = "Rules"
#: Heading of the options that split the step over several GPUs.
SPLIT = "Split over GPUs"

#: Seconds a capture may take before it counts as hanging.
TIMEOUT_S = 300.0

TARGETS = (
    "file.py:factory, package.module:factory, hf:gpt2 (or hf:config.json), torchvision:resnet50, "
    "timm:vit_base_patch16_224"
)
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help=f"{TARGETS}.",
        show_default=False,
    ),
]
TargetOrProgram = Annotated[
    str,
    typer.Argument(metavar="TARGET|PROGRAM", help=f"{TARGETS}; or a program, train.py.", show_default=False),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGS]...", help="The program's own.", show_default=False),
]
Options = Annotated[TargetOptions, Group(_STEP)]
#: Where sizes are ranges, or what a run is given.
OfStep = Annotated[StepOptions, Group(_STEP)]
OfRun = Annotated[
    TargetOptions,
    Group(_STEP, without=("on_cpu",), help={"compile": "Compile the model with torch.compile."}),
]
#: Where each operation is looked at by itself.
OfOperations = Annotated[TargetOptions, Group(_STEP, without=("on_cpu", "compile"))]
OfProgram = Annotated[ProgramOptions, Group("A program")]
SplitOver = Annotated[Split, Group(SPLIT)]
Rules = Annotated[Selection, Group(_RULES)]
Codes = Annotated[Selection, Group(_RULES, without=("min_gain",))]
Input = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        help='An input, such as "input_ids: int64[16,1024]"; repeat.',
        rich_help_panel=_STEP,
    ),
]


@dataclass(frozen=True)
class CaptureOptions:
    """How a target is captured."""

    timeout: float = option(TIMEOUT_S, "Longest capture.", min=1, metavar="SECONDS")
    fresh: bool = option(False, "Capture again, although the target is unchanged.")


Capture = Annotated[CaptureOptions, Group(_STEP)]
#: Where the points of a sweep are what is made anew.
Timeout = Annotated[CaptureOptions, Group(_STEP, without=("fresh",))]


class ScriptCommand(Command):
    """A command to whose scripts belongs what stands behind them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What follows a script, or the module after ``-m``, is the program's."""
        if any(map(is_script, args)) or "-m" in args:
            ctx.allow_interspersed_args = False
        return super().parse_args(ctx, args)


def is_script(text: str) -> bool:
    """Whether a target is a script."""
    return text.endswith(".py")


def refuse_of_others(
    context: typer.Context,
    target: str,
    program: ProgramOptions,
    of_models: Sequence[str] = (),
    *,
    several: bool = False,
) -> bool:
    """Whether a target is a program; options of the other kind of target are refused.

    Args:
        context: The command's.
        target: As it was typed.
        program: Options of programs.
        of_models: Options of models alone, beside those of their step.
        several: What stands behind a model are more of them.

    Raises:
        UsageError: an option has no effect, or the target is not understood.
        TargetError: the file is not there.
    """
    is_program = program.is_module or is_script(target)
    if is_program:
        names = [each.name for each in fields(TargetOptions) if "help" in each.metadata]
        why = "a program makes its own steps; its own arguments stand after --"
        refuse_given(context, [*names, *of_models], why)
        require_program(target, program.is_module)
    else:
        names = [each.name for each in fields(ProgramOptions) if not (several and each.name == "arguments")]
        refuse_given(context, names, "the target is no program")
        require_readable(target)
    return is_program


def note_misplaced(context: typer.Context, script: str, arguments: Sequence[str]) -> None:
    """Say so where a script is given what looks like an option of ours: both may have meant it."""
    ours = {name for parameter in context.command.params for name in parameter.opts}
    for name in dict.fromkeys(argument.partition("=")[0] for argument in arguments):
        if name.startswith("--") and name in ours:
            print(f"{name} went to {script}; options of tilefit stand before the script", file=sys.stderr)
