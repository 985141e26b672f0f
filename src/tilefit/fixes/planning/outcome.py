"""What can be changed and what was: for people, as JSON, Markdown, a page, and the report of the findings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tilefit import console, units
from tilefit.formats import FORMATS, render, renders
from tilefit.report import Report, text
from tilefit.report.html_page import page
from tilefit.report.markdown import escape, table
from tilefit.rules.finding import THROUGHPUT
from tilefit.rules.sites import pattern

if TYPE_CHECKING:
    from tilefit.fixes.planning.answers import Answer
    from tilefit.fixes.planning.plan import AppliedFix, Plan
    from tilefit.fixes.source.patches import Patches

#: Version of the JSON form.
FIX_SCHEMA = 2
_OF_PATCH = "code level where summary note gain_s".split()
NOTHING = "Nothing to fix."


@dataclass(frozen=True)
class Outcome:
    """What can be changed, and what was.

    Attributes:
        report: Of the step as it is.
        plan: What ``tilefit.optimize`` does; None where the target is a function.
        patches: What can be written into the user's files.
        call: The line that applies the plan.
        fuses: It needs the optimizer, which the plan fuses.
        answers: What becomes of each finding, in the order of a check.
        place: Where it goes: the line that builds the model; empty where that is not the user's.
        source_wanted: The user asked for changes of files: what cannot be written is told even where it is
            fixed at run time.
        written: Names of the files that were written.
    """

    report: Report
    plan: Plan | None
    patches: Patches
    call: str
    answers: Sequence[Answer] = ()
    fuses: bool = False
    place: str = ""
    source_wanted: bool = False
    written: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """1 where there is something to change, else 0."""
        return int(bool(self.patches.made or (self.plan and self.plan.fixes)))

    @property
    def left(self) -> Sequence[tuple[Answer, str]]:
        """What is left to the user, with the reason; where changes of files are wanted, also what is only
        done at run time."""
        return [
            (each, reason)
            for each in self.answers
            if (reason := (each.by_hand if self.source_wanted and not each.written else "") or each.reason)
        ]


# ---- for people --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
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
    rows: Iterable[Sequence[str]] = ()
    items: Sequence[tuple[str, str]] = ()
    notes: Iterable[str] = ()
    when: str = ""
    code: str = ""
    diff: str = ""


_LEFT = "Left to you"


def _sections(outcome: Outcome) -> Iterator[_Section]:
    plan, patches = outcome.plan, outcome.patches
    if plan and plan.fixes:
        columns = ["fix", ">saves", "", "level", "proof", "what"]
        how: dict[str, Any] = {"when": _when(outcome), "code": outcome.call}
        yield _Section(_speed(plan), columns, _fix_rows(plan), notes=_compared(plan), **how)
    if patches.made:
        columns = ["rule", ">saves", "", "level", "where", "what"]
        diff = patches.diff().decode(errors="replace").rstrip("\n")
        yield _Section(_files_title(outcome), columns, _patch_rows(outcome), notes=_notes(outcome), diff=diff)
    if plan and plan.refused:
        items = [(f"{r.name}  {_where(r.modules)}", r.reason) for r in plan.refused]
        yield _Section("Left alone", items=items)
    if outcome.left:
        step_s = outcome.report.step.time_s
        items = [(f"{_alone(each, step_s)}: {reason}", each.advice) for each, reason in outcome.left]
        yield _Section(_LEFT, items=items)


def _alone(answer: Answer, step_s: float) -> str:
    """A finding with what its answer saves by itself."""
    saves = " ".join(_gain(answer.gain_s, step_s)) if answer.gain_s else "not priced"
    if answer.level == THROUGHPUT:
        saves = text.times_the_work(answer.gain_s / step_s)
    return f"{answer.code}  {saves}  {answer.level}  {answer.where}"


@renders(Outcome, "text")
def terminal(outcome: Outcome) -> RenderableType:
    """The outcome for a terminal."""
    head = Group(
        Text(_heading(outcome), style="bold"), Text(" · ".join(text.setup(outcome.report)), style="dim")
    )
    nothing = [] if outcome.exit_code else [Text(NOTHING, style="bold green")]
    return _apart([head, *nothing, *map(_shown, _sections(outcome))])


def colored(diff: str) -> Text:
    """A diff for a terminal."""
    styles = {"+": "green", "-": "red", "@": "cyan", "#": "dim"}
    lines = diff.splitlines(keepends=True)
    return Text.assemble(
        *((line, "" if line[:3] in ("+++", "---") else styles.get(line[0], "")) for line in lines)
    )


def beside_diff(outcome: Outcome) -> RenderableType:
    """What a diff does not say."""
    sections = (each for each in _sections(outcome) if each.code or each.title == _LEFT)
    return _apart([_shown(replace(each, columns=())) for each in sections])


def _apart(parts: Sequence[RenderableType]) -> RenderableType:
    """Parts with an empty line between them."""
    return Group(*[each for part in parts for each in (Text(), part)][1:])


def _shown(section: _Section) -> RenderableType:
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


# ---- the words ---------------------------------------------------------------------------------


def _heading(outcome: Outcome) -> str:
    return f"{text.heading(outcome.report)} on {outcome.report.device.title}"


def _speed(plan: Plan) -> str:
    more = "; --measure tells what it is on the GPU here" if plan.is_measurable else ""
    return f"At run time: {plan.speedup:.2f} times as fast ({plan.provenance}), {plan.times}{more}"


def _where(modules: Sequence[str]) -> str:
    return pattern(modules) or "the whole step"


def _files_title(outcome: Outcome) -> str:
    before_s = outcome.report.step.time_s
    after_s = before_s - sum(patch.gain_s for patch in outcome.patches.made)
    names = ", ".join(outcome.written)
    title = f"Written to {names}" if names else "In your files (--diff, --write)"
    return f"{title}: {units.seconds(before_s)} -> {units.seconds(after_s)} a step, estimated"


def _notes(outcome: Outcome) -> Iterator[str]:
    """What the user must know before writing, each once with the rules it is about."""
    codes: dict[str, list[str]] = {}
    for patch in outcome.patches.made:
        if patch.note:
            codes.setdefault(patch.note, []).append(patch.code)
    for note, of in codes.items():
        yield f"{', '.join(of)}: {note}."
    if outcome.plan is not None:
        both = {code for fix in outcome.plan.fixes for code in fix.rules}
        shared = [patch.code for patch in outcome.patches.made if patch.code in both]
        if shared and not outcome.written:
            yield f"{', '.join(shared)}: at run time or in your files, either is enough."


def _fix_rows(plan: Plan) -> Iterator[list[str]]:
    for fix in plan.fixes:
        yield [fix.name, *_gain(fix.saved_s, plan.before_s), fix.level, _proof(fix), fix.summary]
    if len(plan.fixes) > 1:
        yield ["total", *_gain(plan.before_s - plan.after_s, plan.before_s), "", "", ""]


def _patch_rows(outcome: Outcome) -> Iterator[list[str]]:
    for each in outcome.patches.made:
        saves = _gain(each.gain_s, outcome.report.step.time_s)
        yield [each.code, *saves, each.level, each.where, each.summary]


def _gain(gain_s: float, step_s: float) -> tuple[str, str]:
    return units.seconds(gain_s), units.share(gain_s / step_s)


def _proof(fix: AppliedFix) -> str:
    if fix.verification is not None:
        return "proven"
    return "not run" if fix.modules else "setting"


def _compared(plan: Plan) -> list[str]:
    """What the proof compared; nothing where there is none."""
    proof = plan.verification
    if proof is None:
        return []
    agree = f"{proof.compared} outputs, gradients and updated parameters agree in {proof.dtype}"
    return [f"Proof: {agree}, largest relative error {proof.worst:.1e}, allowed {proof.tolerance:.0e}."]


def _when(outcome: Outcome) -> str:
    """Where the line that applies the plan goes."""
    place = f" ({outcome.place})" if outcome.place else ""
    also = " and the optimizer" if outcome.fuses else ""
    return f"After the model{place}{also} {'are' if also else 'is'} made:"


# ---- for programs ------------------------------------------------------------------------------


@renders(Outcome, "json")
def as_json(outcome: Outcome) -> str:
    """The outcome as JSON text."""
    patches = outcome.patches
    data: dict[str, Any] = {
        "schema_version": FIX_SCHEMA,
        "target": outcome.report.model,
        "gpu": outcome.report.device.title,
        "time_s": outcome.report.step.time_s,
        "plan": outcome.plan.to_dict() if outcome.plan else None,
        "call": outcome.call,
        "patches": [{name: getattr(patch, name) for name in _OF_PATCH} for patch in patches.made],
        "findings": [asdict(each) for each in outcome.answers],
        "diff": patches.diff().decode(errors="replace"),
        "written": list(outcome.written),
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


# ---- for pull requests -------------------------------------------------------------------------


@renders(Outcome, "markdown")
def as_markdown(outcome: Outcome) -> str:
    """The outcome as GitHub-flavoured Markdown."""
    lines = [f"# {escape(_heading(outcome))}", "", escape(" · ".join(text.setup(outcome.report)))]
    if not outcome.exit_code:
        lines += ["", NOTHING]
    for each in _sections(outcome):
        lines += ["", f"## {each.title}", ""]
        if each.columns:
            heads = [column.removeprefix(">") for column in each.columns]
            lines += [table(heads, ([*map(escape, row)] for row in each.rows), noun="").whole]
        lines += [f"- {escape(head)}: {escape(rest)}" for head, rest in each.items]
        notes = [f"- {escape(note)}" for note in each.notes]
        lines += ["", *notes] if notes else []
        if each.code:
            lines += ["", escape(each.when), "", "```python", each.code, "```"]
        if each.diff:
            lines += ["", "```diff", each.diff, "```"]
    return "\n".join(lines) + "\n"


# ---- for a browser -----------------------------------------------------------------------------


@renders(Outcome, "html")
def as_page(outcome: Outcome) -> str:
    """The outcome as a page of its own, with the words of the other formats."""
    return page(
        "fix.html",
        title=f"{_heading(outcome)}: fixes",
        heading=_heading(outcome),
        setup=text.setup(outcome.report),
        sections=list(_sections(outcome)),
        nothing="" if outcome.exit_code else NOTHING,
        version=outcome.report.version,
    )


# The formats for findings show those, as a check does.
for _format in set(FORMATS) - {"text", "json", "markdown", "html"}:
    renders(Outcome, _format)(lambda outcome, form=_format: render(outcome.report, form))
