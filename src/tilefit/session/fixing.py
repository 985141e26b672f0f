"""The stages of a fix: the step as it is, a plan for the live model, patches of files, the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any

from tilefit import rules
from tilefit.assessment import Assessment
from tilefit.capture.child import capture_in_child
from tilefit.capture.naming import has_source, program_file, require_readable
from tilefit.cost import fuse
from tilefit.cost.priced import PricedGpu
from tilefit.errors import UsageError
from tilefit.ops import Step
from tilefit.options import ProgramOptions, Selection, StepOptions, TargetOptions

if TYPE_CHECKING:
    from tilefit.capture.targets import Target
    from tilefit.fixes import Plan
    from tilefit.fixes.planning.outcome import Answer, Outcome
    from tilefit.fixes.source.patches import Patches
    from tilefit.fixes.source.program import Files
    from tilefit.report import Report
    from tilefit.rules import Finding
    from tilefit.rules.base import Context

#: Says what is going on while a block runs, and gives it what says more of it.
Stage = Callable[[str], AbstractContextManager[Callable[[str], None]]]


@dataclass(frozen=True, kw_only=True)
class FixRequest:
    """What is to be fixed, and how.

    Attributes:
        target, options: As of ``tilefit check``.
        gpu: The GPU that it is planned for.
        selection: Which fixes, by their names or the codes of the rules they answer.
        level: ``safe`` or ``unsafe``.
        verify: Prove each fix.
        measure: Measure each on this machine's GPU.
        memory_bytes: What the step's tensors may take; None for what fits the GPU.
        timeout_s: How long one capture may take.
        fresh: Capture it again, though it is unchanged.
        program: The target is a program; ``options`` have no effect.
    """

    target: str
    options: TargetOptions
    gpu: PricedGpu
    selection: Selection
    level: str = "safe"
    verify: bool = True
    measure: bool = False
    memory_bytes: float | None = None
    timeout_s: float = 600.0
    fresh: bool = False
    program: ProgramOptions | None = None

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of fixes that may be made."""
        return ("safe", "unsafe")[: 1 + (self.level == "unsafe")]


class FixSession:
    """One fix of one target: every stage is made when it is first asked for, and kept.

    Args:
        request: What is wanted.
        stage: Shows progress.

    Raises:
        UsageError: a name of the selection fits no fix and no rule.
    """

    def __init__(self, request: FixRequest, stage: Stage = lambda _: nullcontext(lambda _: None)) -> None:
        if request.program is None:
            require_readable(request.target)
        self.request = request
        self._stage = stage
        if request.selection.select or request.selection.ignore:
            # Whatever can be wrong without the model is found before the model is loaded.
            from tilefit.fixes.planning.registry import select

            select(request.selection.select, request.selection.ignore)
        else:
            # PyTorch takes seconds to import, and the child process is busy for as long. Nothing of ours is
            # imported so: where two threads import modules that need each other, one finds half of one.
            Thread(target=import_module, args=("torch",), daemon=True).start()

    @cached_property
    def _first(self) -> Step:
        request = self.request
        with self._stage(f"Capturing {request.target}"):
            return capture_in_child(request.target, request.options, request.timeout_s, fresh=request.fresh)

    @cached_property
    def loaded(self) -> Target:
        """The target, loaded in this process."""
        assert self._first  # what does not run is told by the child process, before it is loaded in this one
        from tilefit.capture.targets import load

        options = self.request.options
        with self._stage("Choosing fixes"):
            return load(self.request.target, replace(options, on_cpu=options.on_cpu or self.request.measure))

    @cached_property
    def files(self) -> Files:
        """The target's."""
        from tilefit.capture.targets.user import file_of
        from tilefit.fixes.source.program import Files

        return Files.of(self._first, file_of(self.request.target.rpartition(":")[0]))

    @cached_property
    def assessment(self) -> Assessment:
        """The step as it is."""
        return self.assessed(self._first)

    def assessed(self, step: Step) -> Assessment:
        """A step of this program on the GPU, with the findings that the selected fixes answer."""
        step = fuse(step) if step.settings.compiled else step
        return Assessment(step, self.request.gpu, self._selection)

    @cached_property
    def _selection(self) -> Selection:
        """The rules behind the selected fixes."""
        from tilefit.fixes.planning.registry import codes_of

        wanted = self.request.selection
        return replace(wanted, select=codes_of(wanted.select), ignore=codes_of(wanted.ignore))

    @property
    def _worth_it(self) -> Selection:
        """Those whose saving is worth a change."""
        from tilefit.fixes.planning.planner import MIN_GAIN

        selection = self._selection
        return replace(selection, min_gain=MIN_GAIN) if selection.min_gain is None else selection

    @property
    def report(self) -> Report:
        """Of the step as it is."""
        return self.assessment.report

    @cached_property
    def plan(self) -> Plan | None:
        """What ``tilefit.optimize`` does; None for a target that is a function.

        Raises:
            TilefitError: it cannot be planned, or a function is to be measured or brought into a budget.
        """
        from torch import Tensor, nn
        from torch.utils._pytree import tree_map

        from tilefit.fixes.changes.run import Run
        from tilefit.fixes.planning.planner import make_plan

        request, options = self.request, self.request.options
        if self._first.program.calls_models or not isinstance(self.loaded.model, nn.Module):
            if request.measure or request.memory_bytes is not None:
                option = "--measure" if request.measure else "--memory-budget"
                raise UsageError(
                    f"{request.target} is a function, and fixes at run time are a model's",
                    hint=f"Leave out {option}, or give a factory that returns (model, inputs).",
                )
            return None
        target, model, inputs = self.loaded, self.loaded.model, self.loaded.inputs
        if request.measure:
            model = model.to("cuda")
            inputs = tree_map(lambda leaf: leaf.to("cuda") if isinstance(leaf, Tensor) else leaf, inputs)
        with self._stage("Choosing fixes") as say:
            return make_plan(
                Run(model, inputs, options, loss=target.loss, memory_bytes=request.memory_bytes),
                request.gpu,
                request.selection,
                level=request.level,
                verify=request.verify,
                measure=request.measure,
                say=say,
            )

    @cached_property
    def patches(self) -> Patches:
        """What can be written into the user's files; nothing where none of them is known."""
        from tilefit.fixes.source.patches import Patches, Trial, propose
        from tilefit.fixes.source.training import WRITERS, WRITERS_OF_LOADED

        is_model = self.request.program is None
        if is_model and not has_source(self.request.target):
            return Patches()
        writers, find = WRITERS_OF_LOADED if is_model else WRITERS, partial(_findings, self._worth_it)
        context = self.assessment.context
        trial = Trial(writers, self.files, self._changed, find, self.request.levels)
        with self._stage("Trying changes of your files"):
            return propose(context, trial)

    def _changed(self, sources: Mapping[str, str]) -> Step:
        """The step with other texts of files, by path."""
        options = replace(self.request.options, sources=sources)
        return capture_in_child(self.request.target, options, self.request.timeout_s)

    @cached_property
    def answers(self) -> Sequence[Answer]:
        """What becomes of each finding."""
        from tilefit.fixes.planning.outcome import answers

        plan, patches = self.plan, self.patches
        if plan is None or plan.step is None:
            remaining = patches.remaining
        else:
            after = Assessment(plan.step, self.request.gpu, self._selection)
            remaining = frozenset(finding.code for finding in after.findings)
        return answers(self.assessment.findings, remaining, plan, patches, self.request.levels)

    @property
    def fuses(self) -> bool:
        """The plan fuses the optimizer, so that it must be given it."""
        plan = self.plan
        return (
            plan is not None and plan.run.options.fused_optimizer and not self.request.options.fused_optimizer
        )

    def outcome(self, *, source_wanted: bool = False) -> Outcome:
        """Everything, as data; ``source_wanted``: the user asked for changes of files."""
        from tilefit.fixes.planning.outcome import Outcome

        found = self.report, self.plan, self.patches
        return Outcome(*found, self.call, self.answers, self.fuses, self.place, source_wanted)

    @property
    def place(self) -> str:
        """The user's line that builds the model."""
        return self._first.made.get("", "")

    @property
    def call(self) -> str:
        """The Python that applies the plan. It is given the optimizer where it fuses it, and compiles a model
        that is to be compiled where the plan does not do so itself."""
        from tilefit.fixes.planning.planner import MIN_GAIN

        request, options = self.request, self.request.options
        wanted = request.selection
        names = ("train", "amp", "tf32", "optimizer", "fused_optimizer", "clip", "channels_last", "compile")
        settings: dict[str, tuple[Any, Any]] = {
            "gpu": (request.gpu.name, None),
            "level": (request.level, "safe"),
            **{name: (getattr(options, name), getattr(StepOptions(), name)) for name in names},
            "select": (list(wanted.select), []),
            "ignore": (list(wanted.ignore), []),
            "min_gain": (wanted.min_gain, None),
            "memory_bytes": (request.memory_bytes, None),
        }
        if wanted.min_gain == MIN_GAIN:
            del settings["min_gain"]
        if self.fuses:
            settings["optimizer"] = _Name("optimizer"), None
        given = [
            f"{name}={_literal(value)}" for name, (value, default) in settings.items() if value != default
        ]
        call = f"model = tilefit.optimize(model, inputs, {', '.join(given)}).model"
        plan = self.plan
        compiles = plan is not None and any(fix.name == "compile" for fix in plan.fixes)
        return call if compiles or not options.compile else f"{call}\nmodel = torch.compile(model)"


class ProgramFixSession(FixSession):
    """One fix of a program: its files are changed, and it is run again under the emulated GPU."""

    call = place = ""
    plan = None

    @cached_property
    def _first(self) -> Step:
        request = self.request
        with self._stage(f"Running {request.target}") as say:
            gpu = request.gpu.name
            return capture_in_child(request.target, self._program, request.timeout_s, gpu=gpu, told=say)

    @cached_property
    def files(self) -> Files:
        """The program's."""
        from tilefit.fixes.source.program import Files

        return Files.of(self._first, program_file(self._program.program, self._program.is_module))

    @property
    def _program(self) -> ProgramOptions:
        assert self.request.program is not None
        return self.request.program

    def _changed(self, sources: Mapping[str, str]) -> Step:
        request, options = self.request, replace(self._program, sources=sources)
        return capture_in_child(request.target, options, request.timeout_s, gpu=request.gpu.name)


def _findings(selection: Selection, context: Context) -> list[Finding]:
    return [each.finding for each in rules.find(context, selection)]


class _Name(str):
    """A variable of the user's script."""

    __slots__ = ()


def _literal(value: object) -> str:
    """A value as Python, strings in double quotes."""
    quoted = isinstance(value, str | list) and not isinstance(value, _Name)
    return json.dumps(value) if quoted else str(value)
