"""A way to run the whole program, with the changes of the model that only it calls for."""

from __future__ import annotations

from dataclasses import dataclass

from tilefit.fixes.fix import Candidate, Undo
from tilefit.fixes.run import Run


@dataclass(frozen=True)
class Together(Candidate):
    """Changes of the model that save nothing by themselves, and a change of how it is run that pays less, or
    not at all, without them: an encoder that makes a mask only when it is compiled, say.

    Attributes:
        first: The changes of the model.
        last: How it is run.
    """

    first: tuple[Candidate, ...]
    last: Candidate

    @classmethod
    def of(cls, first: tuple[Candidate, ...], last: Candidate) -> Together:
        """One candidate of several."""
        modules = (path for each in (*first, last) for path in each.modules)
        return cls(tuple(dict.fromkeys(modules)), first, last)

    @property
    def summary(self) -> str:
        return " ".join(each.summary for each in (*self.first, self.last))

    def apply(self, run: Run) -> Undo:
        undos: list[Undo] = []

        def undo() -> None:
            while undos:
                undos.pop()()

        try:
            for each in (*self.first, self.last):
                undos.append(each.apply(run))
        except BaseException:
            undo()
            raise
        return undo
