"""The gradients that are followed: what is known of each one's loss scale, an immutable state with one table
of what changes it; which have changed; and whether they still hold what they held.

A scaled loss leaves a mark on its node of the autograd graph: its scaler, and how often that was updated.
What a backward pass adds to a gradient has the marks that the pass met. What uses gradients is judged by
their state alone. A gradient changed by what nobody saw is *unknown*, and nothing is said of it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from tilefit.emulation.tensor import CudaTensor
from tilefit.precision.tensors import has_values, sampled

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


def scales_of(marks: Iterable[Mark]) -> frozenset[Mark]:
    """The marks of scalers, without those of constants."""
    return frozenset(mark for mark in marks if mark.scaler != HAND)


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
        scales = scales_of(marks)
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


#: Elements by which a gradient is recognised, up to twice as many.
WIDTH = 8
#: The values of so many gradients are kept of each optimizer, and of one in so many others: it takes time.
WITNESSES, APART = 8, 32
#: Of which it is worth knowing whether they hold nothing but zeros.
_LOOKED_AT = (Kind.USED, Kind.SPENT, Kind.LEFT, Kind.UNKNOWN)


@dataclass(slots=True, eq=False)
class Gradient:
    """One parameter's gradient.

    Attributes:
        parameter: A weak reference to the parameter.
        state: What is known of its scale.
        stepped_in: The autocast region in which its parameter was stepped last; 0 for none.
        sample: Some of its values, taken when it was last known, while a step is looked at closely.
        sure: These were there, not all of them zero, when it was looked at last.
        witness: It is one of those whose values are kept, which speak for the others.
        version: How often autograd has counted a write to it, as it was seen last.
    """

    parameter: weakref.ref[Tensor]
    state: State = EMPTY
    stepped_in: int = 0
    sample: Tensor | None = None
    sure: bool = False
    witness: bool = False
    version: int = -1
    _reference: weakref.ref[Tensor] | None = None
    #: Autograd has yet to count so many writes that are known.
    _uncounted: int = 0

    def __post_init__(self) -> None:
        if self.change() is not None:  # it is older than the watch
            self.state = State(Kind.UNKNOWN)

    def speaks(self, number: int) -> None:
        """It is the gradient of this number among an optimizer's."""
        self.witness |= number < WITNESSES or number % APART == 0

    @property
    def value(self) -> Tensor | None:
        """The gradient itself, as it was seen last."""
        return self._reference() if self._reference is not None else None

    @property
    def present(self) -> bool:
        """There was one when it was seen last."""
        return self._reference is not None

    def change(self) -> Cause | None:
        """What has happened to it since the last time; a write through ``.data`` leaves no trace here."""
        parameter, reference = self.parameter(), self._reference
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self._reference, self.sample, self.state = None, None, EMPTY
            return None if reference is None else Cause.CLEARED
        version, before, uncounted = gradient._version, self.version, self._uncounted
        if reference is None or reference() is not gradient:
            self._reference = weakref.ref(gradient)
        elif version == before and not uncounted:
            return None
        self.version, self._uncounted = version, 0
        same = self._reference is reference and before <= version <= before + uncounted
        return None if same else Cause.WRITTEN

    def accept(self, *, ending: bool = False) -> None:
        """What was written to it is known; ``ending`` says that autograd has yet to count the write."""
        self.change()
        self._uncounted = int(ending)
        self.sample = None


def sample(gradients: Iterable[Gradient], *, compare: bool = False) -> None:
    """Keep some values of those gradients that speak for others, in fp32.

    Args:
        gradients: The gradients.
        compare: See whether they are those that were kept before: they may have been changed without a trace,
            cleared, or used and be there as they were. Waits for the device where there is something to see.
    """
    by_device: defaultdict[torch.device, list[tuple[Gradient, Tensor]]] = defaultdict(list)
    for gradient in gradients:
        gradient.sure &= not compare
        part = _part(gradient) if gradient.witness else None
        if part is not None:
            by_device[part.device].append((gradient, part))
    with torch._C._DisableTorchDispatch():  # no mode is to see this, nor one of the user's
        for rows in by_device.values():
            now = torch.cat([part for _, part in rows]).to(torch.float32)
            samples = torch.split(now, [part.numel() for _, part in rows])
            before = [(gradient, gradient.sample) for gradient, _ in rows]
            for (gradient, _), kept in zip(rows, samples, strict=True):
                gradient.sample = kept
            if compare and any(old is not None or g.state.kind in _LOOKED_AT for g, old in before):
                _compare(now, samples, before)


def _part(gradient: Gradient) -> Tensor | None:
    """Some elements, where they lie; None where it has no values of its own."""
    value = getattr(gradient.value, "_local_tensor", gradient.value)
    if isinstance(value, CudaTensor):  # nobody knows its values, but every write to it
        return torch.tensor([float(value.content)], device="cpu")
    with torch._C._DisableTorchDispatch():
        return sampled(value.detach(), WIDTH) if value is not None and has_values(value) else None


def _compare(now: Tensor, samples: Iterable[Tensor], rows: Iterable[tuple[Gradient, Tensor | None]]) -> None:
    """Move the gradients that have changed, or have not, by what was kept of each."""
    before = torch.cat([kept if old is None else old for (_, old), kept in zip(rows, samples, strict=True)])
    differs = (now != before) & ~(now.isnan() & before.isnan())
    flags = torch.stack([differs, now != 0, now.isfinite() & (now != 0)]).tolist()
    places = [iter(flag) for flag in flags]
    for (gradient, old), kept in zip(rows, samples, strict=True):
        changed, filled, telling = (any(list(islice(place, kept.numel()))) for place in places)
        gradient.sure = old is not None and telling and not changed
        cause = _meaning(gradient, changed, filled)
        if cause is not None:
            gradient.state = gradient.state.after(cause)[0]


def _meaning(gradient: Gradient, changed: bool, filled: bool) -> Cause | None:
    kind = gradient.state.kind
    if not filled and (changed or kind in _LOOKED_AT):
        value = getattr(gradient.value, "_local_tensor", gradient.value)
        if value is not None and (isinstance(value, CudaTensor) or not bool(value.detach().any())):
            return Cause.CLEARED
    if changed:
        return Cause.WRITTEN
    return Cause.SEEN if gradient.sure and kind is Kind.USED else None


#: What happens to gradients: the same to all of them, or by the state of each.
Happens = Cause | Callable[[State], Cause]


def move(
    gradients: Iterable[Gradient], cause: Happens, marks: frozenset[Mark] = frozenset()
) -> dict[str, list[Gradient]]:
    """Let something happen to gradients; what is wrong with it, and of which."""
    wrong: defaultdict[str, list[Gradient]] = defaultdict(list)
    # Most are in one state, which is the same object.
    known: dict[int, tuple[State, State, str]] = {}
    for gradient in gradients:
        before = gradient.state
        if id(before) not in known:
            happens = cause if isinstance(cause, Cause) else cause(before)
            known[id(before)] = (before, *before.after(happens, marks))
        _, gradient.state, what = known[id(before)]
        if what:
            wrong[what].append(gradient)
    return wrong
