"""What can be written into the user's files: found, tried, and priced by capturing the changed program."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from tilefit import ops, units
from tilefit.capture.child import captures_in_child
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.errors import TilefitError
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.source.change import Change, Write
from tilefit.fixes.source.checkpoint import ways
from tilefit.fixes.source.file import Edit, SourceFile
from tilefit.fixes.source.program import Files, Program
from tilefit.fixes.source.settings import write_autocast, write_channels_last, write_fused, write_tf32
from tilefit.fixes.source.sizes import write_features, write_vocabulary
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
        others: Codes of the findings of the changed program that are none of a source fix.
        too_large: Why nothing is written that brings the step into the budget it was given; empty where it is
            there, or where a finding says so.
    """

    made: tuple[Patch, ...] = ()
    by_hand: tuple[ByHand, ...] = ()
    others: tuple[str, ...] = ()
    too_large: str = ""

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


#: What is written into the files of a model or a step, by the rule that it answers.
WRITERS: dict[str, Write] = {
    "ALN001": write_features,
    "ALN002": write_vocabulary,
    "LAY001": write_channels_last,
    "NTC003": write_fused,
    "PRC001": write_tf32,
    "PRC002": write_autocast,
}


def propose(
    context: Context,
    find: Callable[[Context], Sequence[Finding]],
    program: Program,
    options: TargetOptions,
    levels: Sequence[str],
    timeout_s: float,
    budget_bytes: float = inf,
) -> Patches:
    """The patches of a target's files; see :func:`propose_for`.

    Args:
        context, find, levels: Of that.
        program: The program, loaded.
        options: How it was captured.
        timeout_s: How long one capture may take.
        budget_bytes: Of the trial.
    """
    trial = Trial(
        WRITERS,
        program,
        lambda changes: _with(options, changes),
        lambda requests: captures_in_child(program.target, requests, timeout_s),
        budget_bytes,
    )
    return propose_for(context, find, trial, levels)


class Trial(NamedTuple):
    """How changes of one kind of target are written and tried.

    Attributes:
        writers: What answers findings, by the rule.
        files: Of the target.
        request: What is captured where changes are made.
        captured: The steps of requests, one after the other, as soon as each is there.
        budget_bytes: What the step may take; what takes more computes modules again in its backward pass.
    """

    writers: Mapping[str, Write]
    files: Files
    request: Callable[[Sequence[Change]], Any]
    captured: Callable[[Sequence[Any]], Generator[Step | TilefitError]]
    budget_bytes: float = inf


def propose_for(
    context: Context, find: Callable[[Context], Sequence[Finding]], trial: Trial, levels: Sequence[str]
) -> Patches:
    """The patches that answer findings, each tried on top of those before it, until no more are worth it.

    Args:
        context: The program's step as it is: its lines are those of the files.
        find: The findings of a step, best first; also asked about the changed program.
        trial: Writes and tries them.
        levels: Patches of other levels are left to the user.
    """
    program, made = context.step.program, list[Patch]()
    #: By code, each finding with what is written for it, or why nothing is.
    written: dict[str, list[tuple[Finding, Change | str]]] = {}
    while True:
        before, found = context, find(context)
        codes = dict.fromkeys(finding.code for finding in found)
        for code in codes.keys() - written.keys() & trial.writers.keys():
            own = [f for f in found if f.code == code and not (made and program and f.source)]
            seen = _on_lines_of(program, context)
            written[code] = [(finding, _written(finding, seen, trial, levels)) for finding in own]
        kept = [patch.change for patch in made]
        both = [each for code in codes for each in written.get(code, ())]
        by_hand = [ByHand(finding, change) for finding, change in both if isinstance(change, str)]
        # What was left out before may be worth it on top of others.
        left = [(f, change) for f, change in both if isinstance(change, Change) and change not in kept]
        for (finding, change), outcome in _tried(left, kept, context, trial):
            if isinstance(outcome, str):
                by_hand.append(ByHand(finding, outcome))
                continue
            gain_s = context.estimate.time_s - outcome.estimate.time_s
            how = finding.code, change.level, change.where, change.summary, change.note
            made.append(Patch(*how, gain_s, change))
            context = outcome
        if context is before:
            break
    others = tuple(code for code in codes if code not in trial.writers)
    fitted = _fitted(kept, _on_lines_of(program, context), trial)
    if isinstance(fitted, Patch):
        return Patches((*made, fitted), tuple(by_hand), others)
    large = [ByHand(finding, fitted) for finding in found if fitted and finding.code == "BAT002"]
    return Patches(tuple(made), (*by_hand, *large), others, "" if large else fitted)


def _on_lines_of(program: ops.Program, context: Context) -> Context:
    """A changed program's step with the lines of the program in the files, which are others."""
    return replace(context, step=replace(context.step, program=program))


def _written(finding: Finding, context: Context, trial: Trial, levels: Sequence[str]) -> Change | str:
    """What is written for a finding, or why nothing is."""
    try:
        change = trial.writers[finding.code](finding, context, trial.files)
        texts_of([change])
    except RefusedError as refused:
        return refused.what
    where = f"{change.summary} in {change.where}"
    return change if change.level in levels else f"{where} is {change.level}: --level {change.level}"


def _fitted(kept: Sequence[Change], context: Context, trial: Trial) -> Patch | str:
    """What brings the step into its memory, on top of other changes, or why nothing does; empty if it is."""
    if context.step.memory.peak_bytes <= trial.budget_bytes or not context.step.settings.training:
        return ""
    reason, has = "no module that can be computed again frees enough", units.capacity(trial.budget_bytes)
    try:
        for way in ways(context, trial.budget_bytes, trial.files):
            for change in way:
                with closing(trial.captured([trial.request([*kept, change])])) as captured:
                    step = next(captured)
                if isinstance(step, TilefitError):
                    reason = f"the program does not run with {change.summary} ({step.what})"
                    break
                after, need = _priced(step, context), units.capacity(step.memory.peak_bytes)
                if step.memory.peak_bytes <= trial.budget_bytes:
                    gain_s = context.estimate.time_s - after.estimate.time_s
                    note = f"it takes {need} at once, not {units.capacity(context.step.memory.peak_bytes)}"
                    return Patch("BAT002", change.level, change.where, change.summary, note, gain_s, change)
                reason = f"with {change.summary} it would still need {need}, and may take {has}"
    except RefusedError as refused:
        return refused.what
    return reason


def _priced(step: Step, before: Context) -> Context:
    step = fuse(step) if step.settings.compiled else step
    return Context(step, before.gpu, estimate_step(step, before.gpu))


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
                after = _priced(step, context)
                if after.estimate.time_s >= context.estimate.time_s:
                    took, takes = (units.seconds(c.estimate.time_s) for c in (context, after))
                    beside = ", the other changes made" if kept else ""
                    beside += "".join(f". {n[:-1]}" for n in step.notes if n not in context.step.notes)
                    yield entry, f"it saves nothing: {takes} a step with it, {took} without{beside}"
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
