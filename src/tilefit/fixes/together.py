"""A way to run the whole program, with the changes of the model that only it calls for."""

from __future__ import annotations

from dataclasses import dataclass

from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet
from tilefit.fixes.run import Run


@dataclass(frozen=True)
class Together(ChangeSet):
    """Changes of the model that save nothing by themselves, and a change of how it is run that pays less, or
    not at all, without them: an encoder that makes a mask only when it is compiled, say.

    Attributes:
        first: The changes of the model.
        last: How it is run.
    """

    first: tuple[ChangeSet, ...]
    last: ChangeSet

    @classmethod
    def of(cls, first: tuple[ChangeSet, ...], last: ChangeSet) -> Together:
        """One candidate of several."""
        modules = (path for each in (*first, last) for path in each.modules)
        return cls(tuple(dict.fromkeys(modules)), first, last)

    @property
    def summary(self) -> str:
        return " ".join(each.summary for each in (*self.first, self.last))

    def make(self, run: Run, edits: Edits) -> None:
        for each in (*self.first, self.last):
            each.make(run, edits)
