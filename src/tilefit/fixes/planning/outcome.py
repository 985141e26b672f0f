"""What can be changed and what was: for people, as JSON, Markdown, a page, and the report of the findings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from tilefit import units
from tilefit.fixes.planning import registry
from tilefit.fixes.planning.plan import Plan, Section, apart, gain, left_alone, made, shown
from tilefit.formats import FORMATS, render, renders
from tilefit.report import Report, text
from tilefit.report.html_page import page
from tilefit.report.markdown import escape, table
from tilefit.rules import Finding
from tilefit.rules.finding import THROUGHPUT

if TYPE_CHECKING:
    from tilefit.fixes.source.patches import Patches

#: Version of the JSON form.
FIX_SCHEMA = 2
_OF_PATCH = "code level where summary note gain_s".split()
NOTHING = "Nothing to fix."


@dataclass(frozen=True)
class Answer:
    """What becomes of a finding.

    Attributes:
        code, level, gain_s, advice: Of the finding: the rule, its ``safety``, its saving alone, what to do.
        where: The module, or the file and line.
        fixes: The fixes that do it at run time.
        written: The line where it is written into the user's files; empty where it is not.
        reason: Why no fix does it; empty where one does.
        by_hand: Why it is not written; empty where it is.
    """

    code: str
    level: str
    gain_s: float
    advice: str
    where: str
    fixes: tuple[str, ...] = ()
    written: str = ""
    reason: str = ""
    by_hand: str = ""


def answers(
    findings: Iterable[Finding],
    remaining: Collection[str],
    plan: Plan | None,
    patches: Patches,
    levels: Sequence[str],
) -> tuple[Answer, ...]:
    """What becomes of the findings of a step.

    Args:
        findings: Of the step as it is, as a check ranks them.
        remaining: Codes of those that the changed step still has.
        plan: None for a target that is a function.
        patches: What is written.
        levels: Those of the fixes that may be made.
    """
    applied, refused = (plan.fixes, plan.refused) if plan else ((), ())

    def answer(finding: Finding) -> Answer:
        code = finding.code
        fixes = tuple(dict.fromkeys(fix.name for fix in applied if code in fix.rules))
        written = ", ".join(patch.where for patch in patches.made if patch.code == code)
        by_hand = next((each.reason for each in patches.by_hand if each.finding.code == code), "")
        reason = "" if fixes or written else why_not(code, by_hand)
        fixes = fixes if fixes or written or reason else ("the other changes",)
        where = finding.module or finding.source or "the whole step"
        how = code, finding.safety, finding.gain_s, finding.fix, where
        return Answer(*how, fixes, written, reason, by_hand)

    def why_not(code: str, by_hand: str) -> str:
        """Why nothing is made for a finding; empty where it is gone with what was made for others."""
        known = {fix.name: fix for fix in registry.all_fixes() if code in fix.rules}
        reasons = [each.reason for name in known for each in refused if each.name == name]
        if reasons or code not in remaining:
            return reasons[0] if reasons else ""
        if by_hand or not known:
            return by_hand or "no fix does it"
        name, fix = next(iter(known.items()))
        if fix.level not in levels:
            return f"{name} does it, and is {fix.level}: --level {fix.level}"
        if plan is None:
            return f"{name} does it at run time, to a model: tilefit.optimize"
        beside = " beside the other fixes" if applied else ""
        return f"{name} does not reach it, or saves too little{beside}"

    return tuple(map(answer, findings))


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


_LEFT = "Left to you"


def _sections(outcome: Outcome) -> Iterator[Section]:
    plan, step_s = outcome.plan, outcome.report.step.time_s
    if plan:
        place = f" ({outcome.place})" if outcome.place else ""
        which = "and the optimizer are" if outcome.fuses else "is"
        when = f"After the model{place} {which} made:"
        fixes = made(plan, "At run time", "--measure")
        yield from (replace(each, when=when, code=outcome.call) for each in fixes)
    yield from _in_files(outcome)
    if plan:
        yield from left_alone(plan)
    if outcome.left:
        items = [(f"{_alone(each, step_s)}: {reason}", each.advice) for each, reason in outcome.left]
        yield Section(_LEFT, items=items)


def _in_files(outcome: Outcome) -> Iterator[Section]:
    patches, step_s = outcome.patches.made, outcome.report.step.time_s
    if not patches:
        return
    after_s = step_s - sum(each.gain_s for each in patches)
    names = ", ".join(outcome.written)
    title = f"Written to {names}" if names else "In your files (--diff, --write)"
    rows = [(each.code, *gain(each.gain_s, step_s), each.level, each.where, each.summary) for each in patches]
    # What the user must know before writing, each once with the rules that it is about.
    notes = {
        each.note: ", ".join(of.code for of in patches if of.note == each.note)
        for each in patches
        if each.note
    }
    at_run_time = {code for fix in (outcome.plan.fixes if outcome.plan else ()) for code in fix.rules}
    if not names and (both := [each.code for each in patches if each.code in at_run_time]):
        notes["at run time or in your files, either is enough"] = ", ".join(both)
    yield Section(
        f"{title}: {units.seconds(step_s)} -> {units.seconds(after_s)} a step, estimated",
        ["rule", ">saves", "", "level", "where", "what"],
        rows,
        notes=[f"{codes}: {note}." for note, codes in notes.items()],
        diff=outcome.patches.diff().decode(errors="replace").rstrip("\n"),
    )


def _alone(answer: Answer, step_s: float) -> str:
    """A finding with what its answer saves by itself."""
    saves = " ".join(gain(answer.gain_s, step_s)) if answer.gain_s else "not priced"
    if answer.level == THROUGHPUT:
        saves = text.times_the_work(answer.gain_s / step_s)
    return f"{answer.code}  {saves}  {answer.level}  {answer.where}"


# ---- in a terminal -----------------------------------------------------------------------------


@renders(Outcome, "text")
def terminal(outcome: Outcome) -> RenderableType:
    """The outcome for a terminal."""
    setup = Text(" · ".join(text.setup(outcome.report)), style="dim")
    nothing = [] if outcome.exit_code else [Text(NOTHING, style="bold green")]
    return apart(
        [Group(Text(_heading(outcome), style="bold"), setup), *nothing, *map(shown, _sections(outcome))]
    )


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
    return apart([shown(replace(each, columns=())) for each in sections])


def _heading(outcome: Outcome) -> str:
    return f"{text.heading(outcome.report)} on {outcome.report.device.title}"


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
