"""What a fix is: it finds the places it can change, and changes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from tilefit.errors import TilefitError
from tilefit.fixes.edits import Edits
from tilefit.fixes.run import Run
from tilefit.rules import base
from tilefit.rules.finding import SAFE


class RefusedError(TilefitError):
    """A fix cannot be applied here without risk; the message is the reason, as a sentence without a stop."""


@dataclass(frozen=True, slots=True)
class Context(base.Context):
    """All that a fix may look at: the priced step as the model is written, and the live run (on ``meta``)."""

    run: Run


@dataclass(frozen=True)
class ChangeSet(ABC):
    """A change that a fix proposes. It holds paths and sizes, never live modules: the same candidate is
    tried on a copy without weights and then applied to the model itself. Equal candidates are one.

    Attributes:
        modules: Paths of the modules it changes; empty where it changes only how the model is run.
        host_s: Host time that its Python adds to a step beside launches, on the host that launch costs are
            stated for. Neither the compiler nor a CUDA graph runs that Python.
    """

    #: From one seed the changed model draws the same random numbers (dropout) as the original.
    same_random_numbers: ClassVar[bool] = True
    #: Fewer launches are less work for the host. Where they are not, since the Python that makes them fewer
    #: takes as long and is not in the price, only the GPU time that is saved decides whether it pays.
    saves_launches: ClassVar[bool] = True

    modules: tuple[str, ...]
    host_s: float = field(default=0.0, kw_only=True, compare=False)

    @property
    @abstractmethod
    def summary(self) -> str:
        """What it does, one sentence: ``Pad lm_head from 50257 to 50304 outputs.``"""

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
    def scopes(self) -> tuple[str, ...]:
        """Paths of the smallest modules that map the same inputs to the same outputs as before.

        Where a model is too large to be run twice, the proof compares these modules.
        """
        return self.modules

    def miniature(self, run: Run) -> tuple[ChangeSet, dict[int, int]] | None:
        """The same change to a small model, for modules too large to be run twice.

        Makes the modules of ``run.model`` (on ``meta``, a copy) smaller, and returns the change that is then
        to be made, and the new sizes of features by the old ones; None where that cannot be.
        """
        return None


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
    #: What it gains can be predicted. What cannot is tried where steps are measured, after all other fixes,
    #: and stays where it gains more than the noise.
    is_priced: ClassVar[bool] = True
    #: It changes how the whole program is run, and is taken up when no other fix is worth it any more: what
    #: others save first it often saves as well, but what only they save is then there, too.
    is_last: ClassVar[bool] = False

    @abstractmethod
    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        """What could be changed. Whether it pays is the planner's business: it prices every candidate by
        capturing the changed model again."""
