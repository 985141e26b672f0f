"""What a fix is: it finds the places it can change, and changes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

from tilefit.errors import TilefitError
from tilefit.fixes.edits import Edits
from tilefit.fixes.run import Run
from tilefit.rules import base
from tilefit.rules.finding import SAFE
from tilefit.rules.sites import pattern


class RefusedError(TilefitError):
    """A fix cannot be applied here without risk; the message is the reason, as a sentence without a stop."""


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
class ChangeSet(ABC):
    """A change that a fix proposes. It holds paths and sizes, never live modules: the same change is tried
    on a copy without weights and then made to the model itself. Equal ones are one.

    Attributes:
        modules: Paths of the modules it changes; empty where it changes only how the model is run.
        host_s: Host time that its Python adds to a step beside launches, on the host that launch costs are
            stated for. Neither the compiler nor a CUDA graph runs that Python.
    """

    #: From one seed the changed model draws the same random numbers (dropout) as the original.
    same_random_numbers: ClassVar[bool] = True
    #: Its summary, with ``{0.where}`` and the like for its attributes.
    words: ClassVar[str] = ""

    modules: tuple[str, ...]
    host_s: float = field(default=0.0, kw_only=True, compare=False)

    @property
    def where(self) -> str:
        """The modules that it changes, in words."""
        return pattern(self.modules) if any(self.modules) else "the model"

    @property
    def summary(self) -> str:
        """What it does, one sentence: ``Pad lm_head from 50257 to 50304 outputs.``"""
        return self.words.format(self, count=len(self.modules))

    @abstractmethod
    def make(self, run: Run, edits: Edits) -> None:
        """Make the change in place by ``edits``; whoever calls takes back what was edited before an error.

        Raises:
            RefusedError: it cannot be made.
        """

    def apply(self, run: Run, edits: Edits | None = None) -> Edits:
        """Make the change in place, on top of other edits if there are any.

        Raises:
            RefusedError: it cannot be made; the run is unchanged.
        """
        edits = Edits() if edits is None else edits
        with edits.all_or_none():
            self.make(run, edits)
        return edits

    @property
    def parts(self) -> tuple[ChangeSet, ...]:
        """The change sets it is made of."""
        return (self,)


@dataclass(frozen=True)
class Several(ChangeSet):
    """Change sets that are made together: a way to run the program, with the changes of the model that only
    it calls for, such as a mask that an encoder makes only when it is compiled."""

    changes: tuple[ChangeSet, ...]

    @classmethod
    def of(cls, *changes: ChangeSet) -> Several:
        """One change set of several."""
        paths = dict.fromkeys(path for each in changes for path in each.modules)
        return cls(tuple(paths), changes, host_s=sum(each.host_s for each in changes))

    @property
    def summary(self) -> str:
        return " ".join(each.summary for each in self.changes)

    @property
    def parts(self) -> tuple[ChangeSet, ...]:
        return self.changes

    def make(self, run: Run, edits: Edits) -> None:
        for each in self.changes:
            each.make(run, edits)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A place that a finding points at and that the fix leaves alone.

    Attributes:
        modules: Paths of the modules.
        reason: Why, one sentence without a stop.
    """

    modules: tuple[str, ...]
    reason: str


class Fix(ABC):
    """A fix answers the findings of some rules by changing the model or the way it is run.

    Subclasses are found by :mod:`tilefit.fixes.registry`: one file, one fix. The docstring says what it does,
    why that is the same function, and what it refuses.
    """

    #: Short name with hyphens: ``pad-linear``.
    name: ClassVar[str]
    #: Codes of the rules whose findings it answers.
    rules: ClassVar[tuple[str, ...]]
    #: ``safe`` (the same function, to be proven) or ``unsafe`` (may change training).
    level: ClassVar[str] = SAFE
    stage: ClassVar[Stage] = Stage.MODEL

    @abstractmethod
    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        """What could be changed. Whether it pays is the planner's business: it prices every candidate by
        capturing the changed model again."""
