"""What a fix is: it finds the places it can change, and changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any

from tilefit.fixes.changes.behaviour import Behaviour, Edits
from tilefit.fixes.changes.behaviour import RefusedError as RefusedError
from tilefit.fixes.changes.behaviour import refuse as refuse
from tilefit.fixes.changes.modules import submodule
from tilefit.fixes.changes.run import Run
from tilefit.rules import base
from tilefit.rules.finding import SAFE
from tilefit.rules.sites import pattern


@dataclass(frozen=True, slots=True)
class Context(base.Context):
    """All that a fix may look at: the priced step as the model is written, and the live run (on ``meta``)."""

    run: Run


class Stage(IntEnum):
    """When a fix is taken up."""

    #: A change of the model: the best first.
    MODEL = 0
    #: A change of how the whole program is run, when no change of the model is worth it any more: what others
    #: save first it often saves as well, but what only they save is then there, too.
    RUN = 1
    #: What it gains cannot be predicted: tried where steps are measured, and kept where it gains more than
    #: the noise.
    TRIED = 2
    #: It makes the step slower, and is taken where the step needs more memory than it may take.
    FIT = 3


@dataclass(frozen=True)
class ChangeSet:
    """A change that a fix proposes. It holds paths and sizes, never live modules: the same change is tried
    on a copy without weights and then made to the model itself. Equal ones are one.

    Attributes:
        modules: Paths of the modules it changes; empty where it changes only how the model is run.
        behaviours: What modules are given, by path.
        options: How the step is run.
        also: What else it does: ``(change, run, edits)``, a function of a file, so that equal changes are.
        words: What it does, one sentence: ``Pad lm_head from 50257 to 50304 outputs.``
        host_s: Host time that its Python adds to a step beside launches, on the host that launch costs are
            stated for. Neither the compiler nor a CUDA graph runs that Python.
        same_random_numbers: From one seed the changed model draws the same random numbers (dropout) as the
            original.
        changes: Those that it is made of: a way to run the program, with the changes of the model that only
            it calls for, such as a mask that an encoder makes only when it is compiled.
    """

    modules: tuple[str, ...]
    _: KW_ONLY
    behaviours: tuple[tuple[str, Behaviour], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    also: Callable[[Any, Run, Edits], None] | None = None
    words: str = field(default="", compare=False)
    host_s: float = field(default=0.0, compare=False)
    same_random_numbers: bool = True
    changes: tuple[ChangeSet, ...] = ()

    @classmethod
    def giving(cls, modules: Iterable[str], behaviour: Behaviour, words: str, **more: Any) -> ChangeSet:
        """One that gives modules the same behaviour; in ``words``, ``{}`` stands for these."""
        paths = tuple(modules)
        behaviours = tuple((path, behaviour) for path in paths)
        return cls(paths, behaviours=behaviours, words=words.format(in_words(paths)), **more)

    @classmethod
    def together(cls, *changes: ChangeSet) -> ChangeSet:
        """One of several."""
        paths = dict.fromkeys(path for each in changes for path in each.modules)
        words, host_s = " ".join(each.words for each in changes), sum(each.host_s for each in changes)
        return cls(tuple(paths), changes=changes, words=words, host_s=host_s)

    def make(self, run: Run, edits: Edits) -> None:
        """Make the change in place by ``edits``; whoever calls takes back what was edited before an error.

        Raises:
            RefusedError: it cannot be made.
        """
        edits.undone_by(run.change(**dict(self.options)))
        if self.also is not None:
            self.also(self, run, edits)
        for path, behaviour in self.behaviours:
            edits.give(submodule(run.model, path), path, behaviour)
        for each in self.changes:
            each.make(run, edits)

    def apply(self, run: Run, edits: Edits | None = None) -> Edits:
        """Make the change in place, on top of other edits if there are any.

        Raises:
            RefusedError: it cannot be made; the run is unchanged.
        """
        edits = Edits() if edits is None else edits
        with edits.all_or_none():
            self.make(run, edits)
        return edits


@contextmanager
def applied(run: Run, changes: Iterable[ChangeSet]) -> Iterator[None]:
    """Within the block changes are made.

    Raises:
        RefusedError: one cannot be made.
    """
    edits = Edits()
    try:
        for change in changes:
            change.apply(run, edits)
        yield
    finally:
        edits.undo()


def in_words(modules: Iterable[str]) -> str:
    """Modules that are changed."""
    paths = list(modules)
    return pattern(paths) if any(paths) else "the model"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A place that a finding points at and that the fix leaves alone.

    Attributes:
        modules: Paths of the modules.
        reason: Why, one sentence without a stop.
    """

    modules: tuple[str, ...]
    reason: str


#: What a fix would change in a step, or leaves alone. Whether it pays is the planner's business: it prices
#: every candidate by capturing the changed model again.
Found = Iterable[ChangeSet | Refusal]


@dataclass(eq=False)
class Fix:
    """A fix answers the findings of some rules by changing the model or the way it is run.

    They are found by :mod:`tilefit.fixes.planning.registry`.

    Attributes:
        name: Short, with hyphens: ``pad-linear``.
        rules: Codes of the rules whose findings it answers.
        find: What could be changed in a step. Its docstring says what the fix does, why that is the same
            function, and what it refuses.
        level: ``safe`` (the same function, to be proven) or ``unsafe`` (may change training).
        stage: When it is taken up.
        compiles_parts: It compiles parts of the model, which run as they are written in one that is compiled
            as a whole.
    """

    name: str
    rules: tuple[str, ...]
    find: Callable[[Context], Found]
    level: str = SAFE
    stage: Stage = Stage.MODEL
    compiles_parts: bool = False


def fix(name: str, *rules: str, **how: Any) -> Callable[[Callable[[Context], Found]], Fix]:
    """Makes a fix of the function that finds what it changes; arguments as for :class:`Fix`."""
    return lambda find: Fix(name, rules, find, **how)
