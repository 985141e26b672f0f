"""What can be written into the user's files: found, tried, and priced by capturing the changed program."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tilefit.capture.child import captures_in_child
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.errors import TilefitError
from tilefit.fixes.fix import RefusedError
from tilefit.fixes.registry import all_fixes
from tilefit.fixes.source.change import WRITERS, Change, Writer
from tilefit.fixes.source.file import Edit, SourceFile
from tilefit.fixes.source.program import Program
from tilefit.ops import Step
from tilefit.options import TargetOptions
from tilefit.rules import Finding
from tilefit.rules.base import Context


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
            again, told of what it does in lines that the captured step does not run.
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
        others: Codes of the findings of the changed program that are none of a source fix.
    """

    made: tuple[Patch, ...] = ()
    by_hand: tuple[ByHand, ...] = ()
    others: tuple[str, ...] = ()

    def texts(self) -> dict[SourceFile, str]:
        """The changed files with their new texts."""
        return texts_of([patch.change for patch in self.made])

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
def writers() -> dict[str, Writer]:
    """What fixes write, by the rules they answer."""
    folder = Path(__file__).parent
    for info in pkgutil.iter_modules([str(folder)], f"{__package__}."):
        import_module(info.name)
    return {code: WRITERS[fix.name] for fix in all_fixes() if fix.name in WRITERS for code in fix.rules}


def propose(
    context: Context,
    find: Callable[[Context], Sequence[Finding]],
    program: Program,
    options: TargetOptions,
    levels: Sequence[str],
    timeout_s: float,
) -> Patches:
    """The patches of a target's files; see :func:`propose_for`.

    Args:
        context, find, levels: Of that.
        program: The program, loaded.
        options: How it was captured.
        timeout_s: How long one capture may take.
    """
    known = writers()

    def write(finding: Finding, context: Context) -> tuple[str, Change] | None:
        writer = known.get(finding.code)
        return writer and (writer.level, writer.write(finding, context, program))

    return propose_for(
        context,
        find,
        Trial(
            write,
            lambda changes: _with(options, changes),
            lambda requests: captures_in_child(program.target, requests, timeout_s),
        ),
        levels,
    )


class Trial(NamedTuple):
    """How changes of one kind of target are written and tried.

    Attributes:
        write: The level of what answers a finding, and the change; None where nothing is known that does.
        request: What is captured where changes are made.
        captured: The steps of requests, one after the other, as soon as each is there.
    """

    write: Callable[[Finding, Context], tuple[str, Change] | None]
    request: Callable[[Sequence[Change]], Any]
    captured: Callable[[Sequence[Any]], Generator[Step | TilefitError]]


def propose_for(
    context: Context, find: Callable[[Context], Sequence[Finding]], trial: Trial, levels: Sequence[str]
) -> Patches:
    """The patches that answer findings, each tried on top of those before it, until nothing new is made.

    Args:
        context: The program's step as it is.
        find: The findings of a step, best first; also asked about the changed program.
        trial: Writes and tries them.
        levels: Patches of other levels are left to the user.
    """
    made: dict[tuple[str, str], Patch] = {}
    while True:
        changes: list[tuple[Finding, Change]] = []
        by_hand: list[ByHand] = []
        others: dict[str, None] = {}
        written: dict[str, str] = {}
        for finding in find(context):
            try:
                answer = trial.write(finding, context)
                if answer is None:
                    others[finding.code] = None
                    continue
                level, change = answer
                texts_of([change])
            except RefusedError as refused:
                by_hand.append(_by_hand(finding, refused.what))
                continue
            key = finding.code, change.summary
            written[finding.code] = level
            if level not in levels:
                reason = f"{change.summary} in {change.where} is {level}: --level {level}"
                by_hand.append(_by_hand(finding, reason, level))
            elif key not in made:  # nor what was left out: on top of other changes it may be worth it
                changes.append((finding, change))
        count = len(made)
        kept = [patch.change for patch in made.values()]
        for (finding, change), outcome in _tried(changes, kept, context, trial):
            key = finding.code, change.summary
            if isinstance(outcome, str):
                by_hand.append(_by_hand(finding, outcome))
                continue
            gain_s = context.estimate.time_s - outcome.estimate.time_s
            level = written[finding.code]
            made[key] = Patch(finding.code, level, change.where, change.summary, change.note, gain_s, change)
            context = outcome
        if len(made) == count:
            return Patches(tuple(made.values()), tuple(by_hand), tuple(others))


def _by_hand(finding: Finding, reason: str, level: str = "") -> ByHand:
    where = finding.module or finding.source or "the whole step"
    return ByHand(finding.code, where, finding.fix, reason, finding.gain_s, level)


def _tried(
    changes: list[tuple[Finding, Change]], kept: list[Change], context: Context, trial: Trial
) -> Iterator[tuple[tuple[Finding, Change], Context | str]]:
    """Each change with the step on top of those before it, or with why it is left out.

    The changed programs are captured in one process, as long as nothing is left out.
    """
    while changes:
        requests = []
        try:
            for n in range(len(changes)):
                requests.append(trial.request([*kept, *(change for _, change in changes[: n + 1])]))
        except RefusedError as refused:
            yield changes.pop(len(requests)), refused.what
            continue
        with closing(trial.captured(requests)) as captured:
            for step in captured:
                entry = changes.pop(0)
                if isinstance(step, TilefitError):
                    yield entry, f"the program does not run with {entry[1].summary} ({step.what})"
                    break
                if step.settings.compiled:
                    step = fuse(step)
                after = Context(step, context.gpu, estimate_step(step, context.gpu))
                if after.estimate.time_s >= context.estimate.time_s:
                    yield entry, "it saves nothing on top of the other changes"
                    break
                context = after
                kept.append(entry[1])
                yield entry, after


def _with(options: TargetOptions, changes: Sequence[Change]) -> TargetOptions:
    told = {name: value for change in changes for name, value in change.told.items()}
    return replace(options, sources=sources_of(changes), **told)


def sources_of(changes: Sequence[Change]) -> dict[str, str]:
    """The texts of the files that changes edit, by real path.

    Raises:
        RefusedError: one would be no Python.
    """
    return {str(file.path): text for file, text in texts_of(changes).items()}


def texts_of(changes: Sequence[Change]) -> dict[SourceFile, str]:
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
