"""What can be written into the user's files: found, tried, and priced by capturing the changed program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilefit import units
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.errors import TilefitError
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.source.change import Change
from tilefit.fixes.source.file import Edit, SourceFile
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.training import Write
from tilefit.ops import Step
from tilefit.rules import Finding
from tilefit.rules.base import Context


class ByHand(NamedTuple):
    """A finding that the user must answer, and why tilefit does not."""

    finding: Finding
    reason: str


@dataclass(frozen=True)
class Patches:
    """Everything that can be written into the user's files.

    Attributes:
        made: In the order in which they were priced.
        by_hand: What could not be.
        remaining: Codes of the findings of the changed program.
    """

    made: tuple[Change, ...] = ()
    by_hand: tuple[ByHand, ...] = ()
    remaining: frozenset[str] = frozenset()

    def texts(self) -> dict[SourceFile, str]:
        """The changed files with their new texts."""
        return texts_of(self.made)

    def diff(self) -> bytes:
        """A unified diff of all files, each in its own encoding, headed by what it does."""
        parts = []
        for file, text in self.texts().items():
            own = (change for change in self.made if any(edit.file is file for edit in change.edits))
            heads = ([f"{each.code} ({each.level}): {each.summary}", f"  {each.note}"] for each in own)
            parts += [f"# {line}\n".encode() for head in heads for line in head if line.strip()]
            parts.append(file.diff(text))
        return b"".join(parts)

    def write(self) -> list[str]:
        """Write all files; their names.

        Raises:
            UsageError: one is not as it was read, or cannot be written.
        """
        texts = self.texts()
        for file in texts:
            file.require_writable()
        for file, text in texts.items():
            file.write(text)
        return [file.name for file in texts]


class Trial(NamedTuple):
    """How changes of one target are written and tried.

    Attributes:
        writers: What answers findings, by the rule.
        files: Of the target.
        captured: The step with other texts of files, by path; raises where there is none.
        find: The findings of a step, best first.
        levels: Patches of other levels are left to the user.
    """

    writers: Mapping[str, Write]
    files: Files
    captured: Callable[[Mapping[str, str]], Step]
    find: Callable[[Context], Sequence[Finding]]
    levels: Sequence[str]

    def written(self, finding: Finding, context: Context) -> Change | str:
        """What is written for a finding, or why nothing is."""
        try:
            change = self.writers[finding.code](finding, context, self.files)
            texts_of([change])
        except RefusedError as refused:
            return refused.what
        where = f"{change.summary} in {change.where}"
        return change if change.level in self.levels else f"{where} is {change.level}: --level {change.level}"

    def with_one_more(self, made: Sequence[Change], change: Change, before: Context) -> Context | str:
        """The step with one more change, or why that is left out."""
        try:
            texts = texts_of([*made, change])
            step = self.captured({str(file.path): text for file, text in texts.items()})
        except RefusedError as refused:
            return refused.what
        except TilefitError as error:
            return f"the program does not run with {change.summary} ({error.what})"
        step = fuse(step) if step.settings.compiled else step
        after = Context(step, before.gpu, estimate_step(step, before.gpu))
        if after.estimate.time_s < before.estimate.time_s:
            return after
        took, takes = (units.seconds(context.estimate.time_s) for context in (before, after))
        beside = ", the other changes made" if made else ""
        beside += "".join(f". {note[:-1]}" for note in after.step.notes if note not in before.step.notes)
        return f"it saves nothing: {takes} a step with it, {took} without{beside}"


def propose(context: Context, trial: Trial) -> Patches:
    """The changes that answer findings, each tried on top of those before it, until no more are worth it.

    Args:
        context: The program's step as it is: its lines are those of the files.
        trial: Writes and tries them.
    """
    program, made = context.step.program, list[Change]()
    #: By code, each finding that is open with what is written for it, or why nothing is.
    written: dict[str, list[tuple[Finding, Change | str]]] = {}
    while True:
        before, found, by_hand = context, trial.find(context), list[ByHand]()
        # A changed program's step with the lines of the program in the files, which are others.
        on_lines_of_files = replace(context, step=replace(context.step, program=program))
        codes = dict.fromkeys(finding.code for finding in found)
        for code in codes.keys() - written.keys() & trial.writers.keys():
            # A line of a changed program is none of the files'.
            own = [f for f in found if f.code == code and not (made and program.was_run and f.source)]
            written[code] = [(f, trial.written(f, on_lines_of_files)) for f in own]
        # What was left out before may be worth it on top of others.
        for finding, change in [each for code in codes for each in written.get(code, ())]:
            after = change if isinstance(change, str) else trial.with_one_more(made, change, context)
            if isinstance(after, str) or isinstance(change, str):
                by_hand.append(ByHand(finding, str(after)))
                continue
            written[finding.code].remove((finding, change))
            gain_s = context.estimate.time_s - after.estimate.time_s
            made.append(replace(change, code=finding.code, gain_s=gain_s))
            context = after
        if context is before:
            return Patches(tuple(made), tuple(by_hand), frozenset(codes))


def texts_of(changes: Iterable[Change]) -> dict[SourceFile, str]:
    """The files that changes edit, with their new texts.

    Raises:
        RefusedError: the new text is no Python.
    """
    edits: dict[SourceFile, list[Edit]] = {}
    for edit in (edit for change in changes for edit in change.edits):
        edits.setdefault(edit.file, []).append(edit)
    texts = {file: file.with_edits(own) for file, own in edits.items()}
    for file, text in texts.items():
        try:
            compile(text, file.name, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise RefusedError(f"{file.name} would not be Python any more (line {error.lineno})") from error
    return texts
