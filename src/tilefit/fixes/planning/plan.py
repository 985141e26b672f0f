"""The plan: what was changed, the proof of it, and what it is worth; as data and as people read it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from torch import nn

from tilefit import console, units
from tilefit.cost.estimate import MEASURED
from tilefit.fixes.changes.behaviour import Edits, changes
from tilefit.fixes.changes.fix import ChangeSet
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.fused_loss import CompiledLoss
from tilefit.fixes.proof.verification import Verification
from tilefit.nn import convert
from tilefit.ops import Step
from tilefit.report import text
from tilefit.rules.sites import pattern

#: Version of the JSON form of a plan.
PLAN_SCHEMA = 1
_SHOWN = "gpu speedup before_s after_s before_bytes after_bytes provenance".split()
#: Refusals that are shown of a plan by itself; a model with many layers may have one for each.
_MOST_REFUSED = 5

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class AppliedFix:
    """A fix that was applied.

    Attributes:
        name, level: The fix's.
        rules: Codes of the rules whose findings it answers.
        modules: Paths of the modules it changed.
        summary: What it did.
        gain_s: Predicted saving per step, on top of the fixes before it; ``gain_low_s`` and ``gain_high_s``
            bound it (80 %).
        measured_s: The same, measured; None where nothing was.
        verification: The proof in fp64, of all fixes together; None for what does not change the model's
            function (settings).
        on_gpu: The comparison in the working precision; None where the model is on no GPU.
    """

    name: str
    level: str
    rules: tuple[str, ...]
    modules: tuple[str, ...]
    summary: str
    gain_s: float
    gain_low_s: float
    gain_high_s: float
    verification: Verification | None
    on_gpu: Verification | None = None
    measured_s: float | None = None

    @property
    def saved_s(self) -> float:
        """What it saves a step: measured where something was, else predicted."""
        return self.gain_s if self.measured_s is None else self.measured_s


@dataclass(frozen=True, slots=True)
class RefusedFix:
    """A fix that was not applied although it would have been worth looking at.

    Attributes:
        name: The fix's.
        modules: Paths of the modules.
        reason: Why not.
    """

    name: str
    modules: tuple[str, ...]
    reason: str


@dataclass(slots=True, repr=False)
class Plan:
    """What was changed, the proof of it, and what it is worth.

    Attributes:
        model: The changed model: the one passed in, unless a copy was asked for.
        run: The model with the settings it is to be run with.
        gpu: The short name of the GPU it was planned for.
        fixes: In the order in which they were applied.
        refused: What was left alone, with the reason.
        before_s, after_s: Time of a step.
        before_bytes, after_bytes: Predicted peak of memory.
        provenance: Where the times come from: ``estimated`` or ``measured``.
        candidates: The fixes as they can be applied to another copy of the model.
        step: The changed step as it runs, as it was priced.
        edits: What the fixes changed.
    """

    model: nn.Module
    run: Run
    gpu: str
    fixes: tuple[AppliedFix, ...]
    refused: tuple[RefusedFix, ...]
    before_s: float
    after_s: float
    before_bytes: int
    after_bytes: int
    provenance: str = "estimated"
    candidates: tuple[ChangeSet, ...] = field(default=(), repr=False)
    step: Step | None = field(default=None, repr=False)
    edits: Edits = field(default_factory=Edits, repr=False)

    @property
    def speedup(self) -> float:
        """Time of a step before, over the time after."""
        return self.before_s / self.after_s if self.after_s else 1.0

    @property
    def times(self) -> str:
        """Before and after: ``105 ms -> 37.9 ms a step; memory 23.6 GiB -> 10.7 GiB``."""
        before, after = units.capacity(self.before_bytes), units.capacity(self.after_bytes)
        memory = f"; memory {before} -> {after}" if before != after else ""
        return f"{units.seconds(self.before_s)} -> {units.seconds(self.after_s)} a step{memory}"

    @property
    def is_measurable(self) -> bool:
        """The times are predicted, and this machine has a GPU that would tell."""
        return self.provenance != MEASURED and torch.cuda.is_available()

    @property
    def verification(self) -> Verification | None:
        """The proof in fp64, of all fixes together; None where nothing had to be proven."""
        return next((fix.verification for fix in self.fixes if fix.verification), None)

    @property
    def on_gpu(self) -> Verification | None:
        """The comparison in the working precision; None where the model is on no GPU."""
        return next((fix.on_gpu for fix in self.fixes if fix.on_gpu), None)

    def undo(self) -> None:
        """Take all fixes back: model and settings are as they were."""
        self.edits.undo()
        self.fixes = ()
        self.after_s, self.after_bytes = self.before_s, self.before_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        proof = self.verification
        return {
            "schema_version": PLAN_SCHEMA,
            **{name: getattr(self, name) for name in _SHOWN},
            "fixes": [asdict(fix) for fix in self.fixes],
            "refused": [asdict(refused) for refused in self.refused],
            "verification": None if proof is None else {**asdict(proof), "ok": proof.ok},
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __rich__(self) -> RenderableType:
        nothing = [] if self.fixes else [Text(text.NOTHING, style="bold green")]
        sections = (*made(self, f"On {self.gpu}", "measure=True"), *left_alone(self, _MOST_REFUSED))
        return apart([*nothing, *map(shown, sections)])

    def _repr_html_(self) -> str:
        page = console.console(record=True, file=io.StringIO(), width=100)
        page.print(self)
        return page.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def __str__(self) -> str:
        return console.plain(self, 80)

    def __repr__(self) -> str:
        names = ", ".join(fix.name for fix in self.fixes) or "nothing"
        return f"<Plan for {self.gpu}: {names}; {self.speedup:.2f} times as fast ({self.provenance})>"


def strip(model: _Model) -> _Model:
    """Take every fix off a model, in place, also off a deep copy or what was saved and loaded; return it.

    For what cannot be done with a changed model (``docs/fix.md`` names it), and for saving one that is to
    be loaded where tilefit is not installed. Where a plan is at hand, :meth:`Plan.undo` also takes back what
    belongs to the optimizer and to the program (``cudnn.benchmark``, TF32).

    Modules compute what their classes say, the layers of :mod:`tilefit.nn` are those of ``torch.nn``, losses
    and whatever was compiled in place are not. Parameters stay as they are.
    """
    convert(model, back=True)
    for module in model.modules():
        changed = changes(module)
        if changed is not None:
            changed.leave()
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = None
        for name, value in list(vars(module).items()):
            if isinstance(value, CompiledLoss):
                setattr(module, name, value.loss)
    return model


# ---- for people --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A part of what is told, whatever the format.

    Attributes:
        title: Its heading.
        columns, rows: A table; a column that starts with ``>`` is of numbers.
        items: What is left, each with the rest that is to be known of it.
        notes: Sentences below.
        when, code: When lines are to be run, and these.
        diff: Of files.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    items: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    when: str = ""
    code: str = ""
    diff: str = ""


def made(plan: Plan, where: str, option: str) -> Iterator[Section]:
    """The fixes of a plan, and its proofs; ``option`` would measure it."""
    if not plan.fixes:
        return
    rows = [
        (fix.name, *gain(fix.saved_s, plan.before_s), fix.level, _proof(fix), fix.summary)
        for fix in plan.fixes
    ]
    if len(plan.fixes) > 1:
        rows.append(("total", *gain(plan.before_s - plan.after_s, plan.before_s), "", "", ""))
    more = f"; {option} tells what it is on the GPU here" if plan.is_measurable else ""
    title = f"{where}: {plan.speedup:.2f} times as fast ({plan.provenance}), {plan.times}{more}"
    notes = [f"Proof: {proof}." for proof in (plan.verification, plan.on_gpu) if proof]
    yield Section(title, ["fix", ">saves", "", "level", "proof", "what"], rows, notes=notes)


def left_alone(plan: Plan, most: int | None = None) -> Iterator[Section]:
    """What was refused, at most so many."""
    items = [
        (f"{each.name}  {pattern(each.modules) or 'the whole step'}", each.reason) for each in plan.refused
    ]
    more = len(items) - len(items[:most])
    if items:
        notes = [f"and {more} more in plan.refused."] if more else []
        yield Section("Left alone", items=items[:most], notes=notes)


def gain(gain_s: float, step_s: float) -> tuple[str, str]:
    """What is saved of a step, and which share of it that is."""
    return units.seconds(gain_s), units.share(gain_s / step_s)


def _proof(fix: AppliedFix) -> str:
    if fix.verification is not None:
        return "proven"
    return "not run" if fix.modules else "setting"


def apart(parts: Sequence[RenderableType]) -> RenderableType:
    """Parts with an empty line between them."""
    return Group(*[each for part in parts for each in (Text(), part)][1:])


def shown(section: Section) -> RenderableType:
    """A section for a terminal."""
    parts: list[RenderableType] = [Text(section.title, style="bold")]
    if section.columns:
        parts.append(console.table(*section.columns, rows=(map(text.plain, row) for row in section.rows)))
    for head, rest in section.items:
        parts += [Text(text.plain(head)), *([_note(rest)] if rest else [])]
    parts += map(_note, section.notes)
    if section.code:
        parts += [Text(), Text(section.when, style="dim")]
        # Lines to be copied are not wrapped.
        parts += [Text(f"  {line}", no_wrap=True, overflow="ignore") for line in section.code.splitlines()]
    return Group(*parts)


def _note(note: str) -> RenderableType:
    return Padding(Text(text.plain(note), style="dim"), (0, 0, 0, 2))
