"""The options that every command with a TARGET has: the step, the split, the rules."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

import typer

from tilefit.capture.naming import is_script, require_program, require_readable
from tilefit.cli.commands import Command
from tilefit.cli.option_groups import Group, refuse_given
from tilefit.errors import UsageError
from tilefit.options import (
    INPUT_SIZES,
    ProgramOptions,
    Selection,
    Split,
    StepOptions,
    TargetOptions,
    option,
)

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


_OfModel = TypeVar("_OfModel", bound=StepOptions)


def asked(
    context: typer.Context,
    target: str,
    options: _OfModel,
    program: ProgramOptions,
    arguments: Sequence[str] | None,
    *,
    of_models: Collection[str] = (),
    own: Collection[str] = (),
    several: bool = False,
) -> _OfModel | ProgramOptions:
    """How the step of a target is made, be it a model or a program: those of the other kind are refused.

    Args:
        context: The command's.
        target: As it was typed.
        options: Those of models.
        program: Those of programs.
        arguments: What stands behind the target.
        of_models: Options of models alone, beside those of their step.
        own: Options of the command's own, by names that options of a kind have as well.
        several: What stands behind a model are more of them.

    Returns:
        ``options``; or ``program`` with its name, its arguments, and the sizes that they leave open.

    Raises:
        UsageError: an option has no effect, or the target is not understood.
        TargetError: the file is not there.
    """
    if not (program.is_module or is_script(target)):
        names = [each.name for each in fields(ProgramOptions) if each.name not in ("arguments", *own)]
        refuse_given(context, names, "the target is no program")
        if arguments and not several:
            raise UsageError(
                f"unexpected argument {arguments[0]!r}",
                hint="Only a program (train.py) has arguments of its own.",
            )
        require_readable(target)
        return options
    require_program(target, program.is_module)
    found = replace(program, program=target, arguments=tuple(arguments or ()))
    for name in INPUT_SIZES:
        size = getattr(options, name, None)
        found = found.at_size(name, size) if size is not None and found.takes(name) else found
    names = [each.name for each in fields(TargetOptions) if "help" in each.metadata]
    idle = [name for name in (*names, *of_models) if name not in (*found.sizes, *own)]
    refuse_given(context, idle, "a program makes its own steps; its own arguments stand after --")
    return found


def note_misplaced(context: typer.Context, script: str, arguments: Sequence[str]) -> None:
    """Say so where a script is given what looks like an option of ours: both may have meant it."""
    ours = {name for parameter in context.command.params for name in parameter.opts}
    for name in dict.fromkeys(argument.partition("=")[0] for argument in arguments):
        if name.startswith("--") and name in ours:
            print(f"{name} went to {script}; options of tilefit stand before the script", file=sys.stderr)
