"""What is known of one gradient's loss scale: an immutable state, and one table of what changes it.

A scaled loss leaves a mark on its node of the autograd graph: its scaler, and how often that was updated.
What a backward pass adds to a gradient has the marks that the pass met. What uses gradients is judged by
their state alone. A gradient changed by what nobody saw is *unknown*, and nothing is said of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

#: The number that stands for a constant of the user's, in place of a scaler's.
HAND = -1


class Mark(NamedTuple):
    """A loss scale: a scaler's number and generation; by hand, :data:`HAND` and the constant."""

    scaler: int
    generation: int = 0
    factor: float = 0.0


#: What a gradient is made of. ``none``: there is none, or zeros. ``plain``: no part carries a scale.
#: ``scaled``: all carry the same one. ``mixed``: some carry one, some do not. ``spread``: they carry
#: different ones. ``divided``: ``unscale_`` has divided it. ``used``: an optimizer used it, plain.
#: ``spent``: used, not plain or not known. ``left``: used, and seen to be there unchanged. ``unknown``:
#: changed by what was not seen.
Kind = StrEnum("Kind", "NONE PLAIN SCALED MIXED SPREAD DIVIDED USED SPENT LEFT UNKNOWN")

#: What happens to a gradient. A backward pass adds (``add_``) a part without a scale (``plain``), one with
#: the gradient's own scale, or with any where it has none (``same``), with ``other`` scales, or one of
#: which nothing is known. ``written``: by hand, unseen. ``kept``: by hand, by what commutes with the
#: scale. ``unscaled``: by hand, by the scale. ``unscale_own`` and ``unscale_other``: ``unscale_``, where
#: the gradient carries the scale that it divides by, or another. ``seen``: it is there as it was.
#: ``stepped`` and ``used``: an optimizer's step begins, or has ended.
Cause = StrEnum(
    "Cause",
    "ADD_PLAIN ADD_SAME ADD_OTHER ADD_UNKNOWN WRITTEN KEPT CLEARED UNSCALED UNSCALE_OWN UNSCALE_OTHER "
    "CLIPPED STEPPED USED SEEN",
)


#: The state after each cause, by the state before; behind ``!`` what is wrong with it.
_TABLE = """
              none    plain         scaled         mixed         spread         divided       used          spent   left          unknown
add_plain     plain   plain         mixed          mixed         mixed          plain         unknown       unknown plain         unknown
add_same      scaled  mixed         scaled         mixed         spread         mixed         unknown       unknown mixed         unknown
add_other     spread  mixed         spread         mixed         spread         mixed         unknown       unknown mixed         unknown
add_unknown   unknown unknown       unknown        unknown       unknown        unknown       unknown       unknown unknown       unknown
written       unknown unknown       unknown        unknown       unknown        unknown       unknown       unknown unknown       unknown
kept          none    plain         scaled         mixed         spread         divided       unknown       unknown unknown       unknown
cleared       none    none          none           none          none           none          none          none    none          none
unscaled      none    plain!again   plain          unknown!mixed unknown!spread divided!again unknown       unknown unknown       unknown
unscale_own   none    divided!plain divided        divided!mixed divided!spread divided!again used!repeated unknown left!repeated divided
unscale_other none    divided!plain divided!older  divided!mixed divided!spread divided!again used!repeated unknown left!repeated divided
clipped       none    plain!hand    scaled!clipped mixed!clipped spread!clipped divided       unknown       unknown unknown       unknown
stepped       none    plain         scaled!stepped mixed!mixed   spread!stepped divided       used!repeated spent   left!repeated unknown
used          none    used          spent          spent         spent          used          used          spent   used          spent
seen          none    plain         scaled         mixed         spread         divided       left          spent   left          unknown
"""  # noqa: E501 - a table


def _read(table: str) -> dict[tuple[Kind, Cause], tuple[Kind, str]]:
    head, *rows = (line.split() for line in table.strip().splitlines())
    return {
        (Kind(before), Cause(cause)): (Kind(cell.partition("!")[0]), cell.partition("!")[2])
        for cause, *cells in rows
        for before, cell in zip(head, cells, strict=True)
    }


TRANSITIONS = _read(_TABLE)

_WITH_MARKS = (Kind.SCALED, Kind.MIXED, Kind.SPREAD)
_GONE = (Kind.NONE, Kind.USED, Kind.SPENT, Kind.LEFT)


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a gradient; ``marks`` are those of its parts that carry a scale."""

    kind: Kind = Kind.NONE
    marks: frozenset[Mark] = frozenset()

    @property
    def scaled(self) -> bool:
        """Some part of it carries a scale that is known."""
        return self.kind in _WITH_MARKS

    @property
    def fresh(self) -> bool:
        """There is one that no optimizer has used."""
        return self.kind not in _GONE

    @property
    def by_hand(self) -> float:
        """The constant that its loss was multiplied by, 0 for none."""
        return next((mark.factor for mark in self.marks if mark.scaler == HAND), 0.0)

    def adding(self, marks: frozenset[Mark]) -> Cause:
        """What a backward pass with these marks is to it."""
        scales = {mark for mark in marks if mark.scaler != HAND}
        if not scales:
            return Cause.ADD_PLAIN
        own = self.marks if self.scaled else scales
        return Cause.ADD_SAME if len(scales) == 1 and scales == own else Cause.ADD_OTHER

    def after(self, cause: Cause, marks: frozenset[Mark] = frozenset()) -> tuple[State, str]:
        """The next state, and what is wrong, or nothing; a backward pass adds its marks."""
        kind, finding = TRANSITIONS[self.kind, cause]
        if cause is Cause.ADD_UNKNOWN or kind not in (*_WITH_MARKS, Kind.PLAIN):
            return State(kind), finding
        kept = frozenset() if cause is Cause.UNSCALED or not self.fresh else self.marks
        return State(kind, kept | marks), finding


#: There is no gradient. Many are in one state, which is one object: then the table is asked once for all.
EMPTY = State()
