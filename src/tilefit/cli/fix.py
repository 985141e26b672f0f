"""``tilefit fix``: from a model to changes that are proven, priced, and written where you want them."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit.cli import config, output, report_output, step_options
from tilefit.cli.calibrated_profile import ProfileFile
from tilefit.cli.local_gpu import local_gpu, predicted_gpu
from tilefit.cli.step_options import codes
from tilefit.errors import UsageError

if TYPE_CHECKING:
    from tilefit.capture.child import CaptureOptions
    from tilefit.fixes import Plan
    from tilefit.fixes.outcome import Outcome
    from tilefit.fixes.source.program import Program
    from tilefit.gpus import Gpu
    from tilefit.ops import Step
    from tilefit.rules import Finding

Level = Literal["safe", "unsafe"]

_FIXES = "Fixes"
_OUTPUT = "Output"


def fix(
    context: typer.Context,
    target: step_options.Target,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU to plan for. Default: the one in this machine.")
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
    timeout: step_options.Timeout = step_options.TIMEOUT_S,
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
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE",
            help="Only these: codes of rules or their beginnings, or names of fixes; repeat or separate by "
            "commas.",
            rich_help_panel=_FIXES,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Not these.", rich_help_panel=_FIXES)
    ] = None,
    min_gain: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Smallest gain worth a change, as a share of the step.",
            rich_help_panel=_FIXES,
        ),
    ] = None,
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
    from tilefit.checker import resolve

    settled = config.load(Path.cwd())
    wanted = codes(select) or settled.select
    unwanted = (*settled.ignore, *codes(ignore))
    if diff and (write or output_format not in (None, "text") or output_file):
        raise UsageError("--diff prints a patch and nothing else", hint="Leave out the other option.")
    if measure:
        device = predicted_gpu(gpu, local_gpu())
    else:
        device, *others = resolve(gpu or settled.gpu or None)
        if others:
            raise UsageError("a plan is made for one GPU", hint=f"Name one: --gpu {device.name}.")
    if (diff or write) and target.partition(":")[0] in ("hf", "torchvision", "timm"):
        raise UsageError(
            f"{target} is a library's model: there is no source of yours to change",
            hint="Leave out --diff and --write, or give the file of yours that builds it: file.py:factory.",
        )

    options = step_options.capture_options(context)
    wishes = _Wishes(
        gpu=device,
        level=level,
        verify=verify,
        measure=measure,
        select=wanted,
        ignore=unwanted,
        per_module_ignores=settled.per_module_ignores,
        min_gain=min_gain if min_gain is not None else settled.min_gain,
        timeout_s=timeout,
        own_optimizer=train
        and not any(step_options.given(context, name) for name in ("optimizer", "fused_optimizer")),
    )
    outcome = replace(_outcome(target, options, wishes), source_wanted=diff or write)
    if write:
        outcome = replace(outcome, written=outcome.patches.write())
    if diff:
        _print_diff(outcome)
        return bool(outcome.patches.made)
    report_output.show(outcome, output_format, output_file, trimmed=False)
    return outcome.exit_code


@dataclass(frozen=True, kw_only=True)
class _Wishes:
    """What the user wants to be fixed, and how; with the optimizer of their own program where no option names
    one."""

    gpu: Gpu
    level: str
    verify: bool
    measure: bool
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    per_module_ignores: Mapping[str, Sequence[str]]
    min_gain: float | None
    timeout_s: float
    own_optimizer: bool

    @property
    def levels(self) -> tuple[str, ...]:
        return ("safe", "unsafe")[: 1 + (self.level == "unsafe")]

    def rules(self, names: Sequence[str]) -> tuple[str, ...]:
        """Codes of rules behind names of fixes; codes stay."""
        from tilefit.fixes.registry import all_fixes

        fixes = {fix.name: fix.rules for fix in all_fixes()}
        return tuple(code for name in names for code in fixes.get(name.lower(), (name,)))


def _outcome(target: str, options: CaptureOptions, wishes: _Wishes) -> Outcome:
    """Capture the target, plan, and look for what can be written."""
    if wishes.select or wishes.ignore:
        # Whatever can be wrong without the model is found before the model is loaded.
        from tilefit.fixes.registry import select

        select(wishes.select, wishes.ignore)
    else:
        # PyTorch takes seconds to import, and the child process is busy for as long.
        Thread(target=import_module, args=("tilefit.fixes",), daemon=True).start()
    from tilefit.capture.child import capture_in_child

    with output.progress(f"Capturing {target}"):
        step = capture_in_child(target, options, wishes.timeout_s)

    from tilefit import rules
    from tilefit.capture.targets import InputOptions
    from tilefit.cost import estimate_step
    from tilefit.cost.fusion import fuse
    from tilefit.cost.lookup import title
    from tilefit.fixes.outcome import Outcome
    from tilefit.fixes.planner import MIN_GAIN
    from tilefit.fixes.registry import all_fixes
    from tilefit.fixes.source.patches import Patches, propose, source_fixes
    from tilefit.fixes.source.program import Program, has_source
    from tilefit.report import build
    from tilefit.rules.base import Context

    min_gain = MIN_GAIN if wishes.min_gain is None else wishes.min_gain

    def find(context: Context) -> list[Finding]:
        return rules.run(
            context.step,
            context.gpu,
            context.estimate,
            select=wishes.rules(wishes.select),
            ignore=wishes.rules(wishes.ignore),
            min_gain=min_gain,
            per_module_ignores=wishes.per_module_ignores,
        )

    def priced(step: Step) -> Context:
        step = fuse(step) if step.settings.compiled else step
        return Context(step, wishes.gpu, estimate_step(step, wishes.gpu))

    sizes = (options.batch, options.seq, options.image_size)
    real = options.on_cpu or wishes.measure
    inputs = InputOptions(options.inputs, *sizes, options.train, "cpu" if real else "meta")
    with output.progress("Choosing fixes"), redirect_stdout(sys.stderr):
        program = Program(target, inputs)
        own = _with_own_optimizer(program, options, wishes)
    if own != options:
        options = own
        with output.progress(f"Capturing {target} with its own optimizer"):
            step = capture_in_child(target, options, wishes.timeout_s)
    context = priced(step)
    findings = find(context)
    with output.progress("Choosing fixes"), redirect_stdout(sys.stderr):
        plan = _plan(program, options, wishes, min_gain)
    patches = Patches()
    if has_source(target):
        with output.progress("Trying changes of your files"), redirect_stdout(sys.stderr):
            patches = propose(context, find, program, options, wishes.levels, wishes.timeout_s)
    others: Sequence[str] = patches.others
    if plan is not None:
        named = {each.name for each in plan.refused}
        elsewhere = [each for each in all_fixes() if each.level not in wishes.levels or each.name in named]
        answered = {*source_fixes(), *(code for each in elsewhere for code in each.rules)}
        after = plan.run.on_meta().capture()
        found = find(priced(after))
        others = [code for code in dict.fromkeys(each.code for each in found) if code not in answered]
    fuses = plan is not None and plan.run.fused_optimizer and not options.fused_optimizer
    compiles = plan is not None and any(fix.name == "compile" for fix in plan.fixes)
    return Outcome(
        report=build(context.step, wishes.gpu, context.estimate, findings, title(wishes.gpu)),
        plan=plan,
        patches=patches,
        call=_call(options, wishes, min_gain, fuses, compiles),
        others=others,
        fuses=fuses,
        place=program.built_at,
    )


def _with_own_optimizer(program: Program, options: CaptureOptions, wishes: _Wishes) -> CaptureOptions:
    """The options with the optimizer that the user's files make for a model; a function runs its own."""
    from torch import nn

    from tilefit.fixes.source.optimizer import optimizer_of
    from tilefit.fixes.source.program import has_source

    is_models = isinstance(program.loaded.model, nn.Module) and has_source(program.target)
    return replace(options, **optimizer_of(program)) if wishes.own_optimizer and is_models else options


def _plan(program: Program, options: CaptureOptions, wishes: _Wishes, min_gain: float) -> Plan | None:
    """What ``tilefit.optimize`` does; None for a target that is a function.

    Raises:
        TilefitError: it cannot be planned, or a function is to be measured.
    """
    from torch import Tensor, nn
    from torch.utils._pytree import tree_map

    from tilefit.fixes import optimize

    model, inputs = program.loaded.model, program.loaded.inputs
    if not isinstance(model, nn.Module):
        if wishes.measure:
            raise UsageError(
                f"{program.target} is a function, and fixes at run time are a model's",
                hint="Leave out --measure, or give a factory that returns (model, inputs).",
            )
        return None
    if wishes.measure:
        model = model.to("cuda")
        inputs = tree_map(lambda leaf: leaf.to("cuda") if isinstance(leaf, Tensor) else leaf, inputs)
    return optimize(
        model,
        inputs,
        gpu=wishes.gpu,
        level=wishes.level,
        train=options.train,
        amp=options.amp,
        tf32=options.tf32,
        optimizer=options.optimizer,
        fused_optimizer=options.fused_optimizer,
        channels_last=options.channels_last,
        compile=options.compiled,
        loss=program.loaded.loss,
        select=wishes.select,
        ignore=wishes.ignore,
        min_gain=min_gain,
        verify=wishes.verify,
        measure=wishes.measure,
    )


def _call(options: CaptureOptions, wishes: _Wishes, min_gain: float, fuses: bool, compiles: bool) -> str:
    """The Python that applies the plan. It is given the optimizer where it ``fuses`` it, and compiles a model
    that is to be compiled where the plan does not do so itself (``compiles``)."""
    settings = {
        "gpu": wishes.gpu.name,
        "level": wishes.level,
        "train": options.train,
        "amp": options.amp,
        "tf32": options.tf32,
        "optimizer": _Name("optimizer") if fuses else options.optimizer,
        "fused_optimizer": options.fused_optimizer,
        "channels_last": options.channels_last,
        "compile": options.compiled,
        "select": list(wishes.select),
        "ignore": list(wishes.ignore),
        "min_gain": min_gain,
    }
    from tilefit.fixes.planner import optimize

    defaults = {name: p.default for name, p in inspect.signature(optimize).parameters.items()}
    given = [
        f"{name}={_literal(value)}" for name, value in settings.items() if value not in (defaults[name], [])
    ]
    call = f"model = tilefit.optimize(model, inputs, {', '.join(given)}).model"
    return call if compiles or not options.compiled else f"{call}\nmodel = torch.compile(model)"


class _Name(str):
    """A variable of the user's script."""

    __slots__ = ()


def _literal(value: object) -> str:
    """A value as Python, strings in double quotes."""
    quoted = isinstance(value, str | list) and not isinstance(value, _Name)
    return json.dumps(value) if quoted else str(value)


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
