"""``tilefit precision``: watch a training script for a while, and say what is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tilefit import gpus
from tilefit.cli import report_output, step_options
from tilefit.cli.completion import gpu_names
from tilefit.cli.option_groups import Group, grouped, refuse_given
from tilefit.errors import TargetError, TilefitError, UsageError
from tilefit.options import option

if TYPE_CHECKING:
    from tilefit.ops.program import Assumption
    from tilefit.precision.watching import Watch
    from tilefit.report.watched import Table


#: Where a script needs a GPU and nobody has named one.
_GPU = "h100-sxm"
#: Steps watched; on the emulated GPU nothing comes about later.
_STEPS, _EMULATED_STEPS = 100, 12


@dataclass(frozen=True)
class Looks:
    """How long a script is watched, and how closely."""

    steps: int | None = option(
        None,
        f"End the script after this many steps of its optimizer; default: {_STEPS}, "
        f"on an emulated GPU {_EMULATED_STEPS}.",
        min=1,
        metavar="N",
    )
    every: int = option(
        25, "Look closely at one step in this many, after the first four.", min=1, metavar="N"
    )
    numerics: bool = option(True, "Look closely at all, or keep the books alone.", "--numerics/--no-numerics")
    find_non_finite: bool = option(False, "Check every operation for inf and NaN; slow.")
    strict: bool = option(False, "Notes count as findings too, for the exit code.")


@dataclass(frozen=True)
class Emulation:
    """The GPU that a script is told of where there is none."""

    gpu: str = option(
        "",
        "Run it on this GPU, emulated: with shapes and no values. By itself where it needs a GPU and there "
        "is none.",
        metavar="NAME",
        show_default=False,
        autocompletion=gpu_names,
    )
    fake_data: bool = option(False, "With --gpu: make up data and weights that are not there, at random.")


#: What stands behind the script is the script's own.
SETTINGS = {"context_settings": {"allow_interspersed_args": False}}


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
    emulation: Annotated[Emulation, Group("Without a GPU")],
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
    if emulation.gpu:
        gpus.get(emulation.gpu)
        refuse_given(context, ["find_non_finite"], "the emulated GPU has no values")
    else:
        refuse_given(context, ["fake_data"], "it goes with --gpu")
    own = list(arguments or ())
    if own[:1] == ["--"]:  # as other verbs have it
        del own[0]
    else:
        step_options.note_misplaced(context, str(script), own)
    from tilefit.precision.watching import Watch

    watch = Watch(
        every=looks.every,
        numerics=looks.numerics,
        steps=looks.steps or (_EMULATED_STEPS if emulation.gpu else _STEPS),
        find_non_finite=looks.find_non_finite,
        select=selection.select,
        ignore=selection.ignore,
    )
    run = _Run(script, own, watch, shown, looks.strict)
    error, interrupted = run.emulated(emulation) if emulation.gpu else run.as_it_is()
    if error is None and not watch.steps and not interrupted:
        error = TargetError(
            "no optimizer made a step",
            where=str(script),
            hint="Watch a script that trains with a torch.optim optimizer, for long enough to make a step. "
            "Processes that it starts are not watched: start them with torchrun.",
        )
    if error is not None and not watch.steps and _missed_a_gpu(error):
        return _again_with_a_gpu(error)
    code = 0
    if watch.alarms or (error is None and watch.steps):
        code = run.show()
    if interrupted:
        raise KeyboardInterrupt
    if error is not None:
        raise error
    return code


@dataclass
class _Run:
    """A script that is run under a watch."""

    script: Path
    arguments: list[str]
    watch: Watch
    shown: report_output.Destination
    strict: bool
    #: What the report says of the GPU beside what was watched.
    gpu: str = ""
    assumptions: Callable[[], Sequence[Assumption]] = tuple

    def as_it_is(
        self, explained: Callable[[BaseException], TilefitError | None] = lambda error: None
    ) -> tuple[TilefitError | None, bool]:
        """Run it; what went wrong in it, and whether the user ended it."""
        from tilefit.capture.script import run_script

        try:
            return run_script(self.script, self.arguments, self.watch, self._stuck, explained), False
        except KeyboardInterrupt:
            return None, True

    def emulated(self, emulation: Emulation) -> tuple[TilefitError | None, bool]:
        """Run it on an emulated GPU; its files are not kept."""
        from tilefit.capture.program.run import on_emulated_gpu

        gpu = gpus.get(emulation.gpu)
        self.gpu = f"an emulated {gpu.title}"
        with (
            tempfile.TemporaryDirectory(prefix="tilefit-", ignore_cleanup_errors=True) as folder,
            on_emulated_gpu(gpu, Path(folder), fake=emulation.fake_data) as (around, modes),
        ):
            self.assumptions = lambda: modes.meetings.assumptions
            return self.as_it_is(around.explained)

    def _stuck(self) -> NoReturn:
        self.watch.stop()
        code = self.show()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def show(self) -> int:
        """Show what was found; the exit code. One rank speaks for all: what ranks disagree on, it knows."""
        document = self.watch.report(self.script.name)
        if self.gpu:
            document = replace(
                document,
                setup=(*document.setup, self.gpu),
                tables=(*document.tables, *_assumed(self.assumptions())),
            )
        first = os.environ.get("RANK", "0") == "0"
        if first:
            self.shown.show(document)
        # A launcher takes every other code for a crash, and says so over the report.
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        code = int(bool(document.findings)) if self.strict else document.exit_code
        return code if first and not launched else 0


def _assumed(assumptions: Sequence[Assumption]) -> list[Table]:
    """What the script was told that nobody knows."""
    from tilefit.report.watched import Table

    rows = tuple((a.source, a.name, a.what, a.value, str(a.count)) for a in assumptions)
    title = "Values that the script read and nobody knows, and what it was told"
    return [Table(title, ("line", "read by", "of", "told", "times"), rows)] if rows else []


def _missed_a_gpu(error: TilefitError) -> bool:
    """Whether a script has failed where PyTorch was asked for CUDA, and there is none."""
    import torch

    cause, deepest = error.__cause__, None
    for frame, _ in traceback.walk_tb(None if cause is None else cause.__traceback__):
        deepest = frame.f_code
    return deepest is torch.cuda._lazy_init.__code__ and not torch.cuda.is_available()


def _again_with_a_gpu(error: TilefitError) -> int:
    """Run the same command again, with an emulated GPU, in a process that has seen nothing of the first."""
    command = sys.orig_argv[1:]
    if "precision" not in command:
        error.hint = f"Run it on an emulated GPU: --gpu {_GPU}."
        raise error
    options = command.index("precision") + 1
    print(f"No GPU here: running it on an emulated one (--gpu {_GPU}).", file=sys.stderr, flush=True)
    arguments = [*command[:options], "--gpu", _GPU, *command[options:]]
    return subprocess.run([sys.executable, *arguments], check=False).returncode
