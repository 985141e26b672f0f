"""What can be written into the user's files: found, tried, and priced by capturing the changed program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache

from tilefit.capture.child import CaptureOptions, captures_in_child
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.errors import TilefitError
from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change, SourceFix
from tilefit.fixes.source.file import Edit, SourceFile
from tilefit.fixes.source.program import Program
from tilefit.ops import Step
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.registry import discover

#: Prices a step: its time in seconds.
Price = Callable[[Step], float]


@dataclass(frozen=True)
class Patch:
    """A change of the user's files that was tried.

    Attributes:
        code: The rule it answers.
        level: ``safe`` or ``unsafe``.
        where: File and line.
        summary: What is written.
        note: What the user must know before writing it; may be empty.
        gain_s: Predicted saving per step, on top of the patches before it: the changed program was captured
            again; where the captured step does not run the changed lines, the finding's.
        change: The edits.
    """

    code: str
    level: str
    where: str
    summary: str
    note: str
    gain_s: float
    change: Change


@dataclass(frozen=True)
class ByHand:
    """A finding that the user must answer.

    Attributes:
        code: The rule.
        where: The module, or the file and line.
        advice: What to change.
        reason: Why tilefit does not.
        gain_s: Predicted saving per step.
        level: The level at which tilefit would; empty where at none.
    """

    code: str
    where: str
    advice: str
    reason: str
    gain_s: float
    level: str = ""


@dataclass(frozen=True)
class Patches:
    """Everything that can be written into the user's files.

    Attributes:
        made: In the order in which they were priced.
        by_hand: What could not be.
    """

    made: tuple[Patch, ...] = ()
    by_hand: tuple[ByHand, ...] = ()

    def texts(self) -> dict[SourceFile, str]:
        """The changed files with their new texts."""
        return _texts([patch.change for patch in self.made])

    def diff(self) -> bytes:
        """A unified diff of all files, each in its own encoding, headed by what it does."""
        parts = []
        for file, text in self.texts().items():
            for patch in self.made:
                if any(syntax.file is file for syntax in patch.change.edits):
                    head = f"{patch.code} ({patch.level}): {patch.summary}"
                    for line in (head, *([f"  {patch.note}"] if patch.note else [])):
                        parts.append(f"# {line}\n".encode(file.encoding, errors="replace"))
            parts.append(file.diff(text))
        return b"".join(parts)

    def write(self) -> list[str]:
        """Write all files; their names.

        Raises:
            UsageError: one is not as it was read, or cannot be written.
        """
        texts = self.texts()
        for file in texts:
            file.require_unchanged()
        for file, text in texts.items():
            file.write(text)
        return [file.name for file in texts]


@cache
def source_fixes() -> dict[str, SourceFix]:
    """Every source fix by the rule it answers."""
    found = discover(SourceFix, __name__.rpartition(".")[0])  # type: ignore[type-abstract]
    return {fix.code: fix for fix in found}


def propose(
    findings: Sequence[Finding],
    context: Context,
    program: Program,
    options: CaptureOptions,
    levels: Sequence[str],
    timeout_s: float,
) -> Patches:
    """The patches that answer findings, each tried on top of those before it.

    Args:
        findings: Of the program as it is, best first.
        context: Its step.
        program: The program, loaded.
        options: How it was captured.
        levels: Patches of other levels are left to the user.
        timeout_s: How long one capture may take.
    """
    changes: list[tuple[Finding, Change]] = []
    by_hand: list[ByHand] = []
    fixes = source_fixes()

    def refuse(finding: Finding, reason: str, level: str = "") -> None:
        where = finding.module or finding.source or "the whole step"
        by_hand.append(ByHand(finding.code, where, finding.fix, reason, finding.gain_s, level))

    for finding in findings:
        if finding.code not in fixes:
            continue
        fix = fixes[finding.code]
        try:
            change = fix.change(finding, context, program)
            _texts([change])
        except RefusedError as refused:
            refuse(finding, refused.what)
            continue
        if fix.level in levels:
            changes.append((finding, change))
        else:
            where = f"{next(iter(change.edits)).file.name}:{change.line}"
            refuse(finding, f"{change.summary} in {where} is {fix.level}: --level {fix.level}", fix.level)

    def price(step: Step) -> float:
        return estimate_step(fuse(step) if options.compiled else step, context.gpu).time_s

    made = []
    for (finding, change), outcome in _tried(changes, program.target, options, price, context, timeout_s):
        if isinstance(outcome, str):
            refuse(finding, outcome)
            continue
        made.append(
            Patch(
                code=finding.code,
                level=fixes[finding.code].level,
                where=f"{next(iter(change.edits)).file.name}:{change.line}",
                summary=change.summary,
                note=change.note,
                gain_s=outcome if change.runs else finding.gain_s,
                change=change,
            )
        )
    return Patches(tuple(made), tuple(by_hand))


def _tried(
    changes: list[tuple[Finding, Change]],
    target: str,
    options: CaptureOptions,
    price: Price,
    context: Context,
    timeout_s: float,
) -> Iterator[tuple[tuple[Finding, Change], float | str]]:
    """Each change with the seconds it saves on top of those before it, or with why it is left out.

    The changed programs are captured in one process, as long as nothing is left out.
    """
    kept: list[Change] = []
    before_s = context.estimate.time_s
    while changes:
        requests = []
        try:
            for n in range(len(changes)):
                requests.append(_with(options, [*kept, *(change for _, change in changes[: n + 1])]))
        except RefusedError as refused:
            yield changes.pop(len(requests)), refused.what
            continue
        with closing(captures_in_child(target, requests, timeout_s)) as captured:
            for step in captured:
                entry = changes.pop(0)
                gain_s = before_s - price(step) if isinstance(step, Step) else 0.0
                if isinstance(step, TilefitError):
                    yield entry, f"the program does not run with {entry[1].summary} ({step.what})"
                    break
                if entry[1].runs and gain_s <= 0:
                    yield entry, "it saves nothing on top of the changes above"
                    break
                before_s -= gain_s
                kept.append(entry[1])
                yield entry, gain_s


def _with(options: CaptureOptions, changes: Sequence[Change]) -> CaptureOptions:
    return replace(options, sources={str(file.path): text for file, text in _texts(changes).items()})


def _texts(changes: Sequence[Change]) -> dict[SourceFile, str]:
    """The files that changes edit, with their new texts.

    Raises:
        RefusedError: the new text is no Python.
    """
    edits: dict[SourceFile, list[Edit]] = {}
    for change in changes:
        for syntax, own in change.edits.items():
            edits.setdefault(syntax.file, []).extend(own)
    texts = {file: file.with_edits(own) for file, own in edits.items()}
    for file, text in texts.items():
        try:
            compile(text, file.name, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise RefusedError(f"{file.name} would not be Python any more (line {error.lineno})") from error
    return texts
