"""The gradients that are followed: which have changed, and whether they still hold what they held."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefit.emulation.tensor import CudaTensor
from tilefit.precision.marks import EMPTY, Cause, Kind, Mark, State
from tilefit.precision.tensors import has_values, sampled

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
    def size(self) -> int:
        """Elements of the gradient, as it was seen last."""
        value = self.value
        return 0 if value is None else value.numel()

    @property
    def present(self) -> bool:
        """There was one when it was seen last."""
        return self._reference is not None

    def change(self) -> Cause | None:
        """What has happened to it since the last time; a write through ``.data`` leaves no trace here."""
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        reference = self._reference
        if gradient is None:
            if reference is None:
                return None
            self._reference, self.sample, self.state = None, None, EMPTY
            return Cause.CLEARED
        version, before = gradient._version, self.version
        if reference is not None and reference() is gradient:
            if version == before and not self._uncounted:
                return None
            self.version = version
            counted, self._uncounted = before <= version <= before + self._uncounted, 0
            return None if counted else Cause.WRITTEN
        self._reference, self.version, self._uncounted = weakref.ref(gradient), version, 0
        return Cause.WRITTEN

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
        value = gradient.value if gradient.witness else None
        part = None if value is None else _part(getattr(value, "_local_tensor", value))
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


def _part(value: Tensor) -> Tensor | None:
    """Some elements, where they lie; None where it has no values of its own."""
    if isinstance(value, CudaTensor):  # nobody knows its values, but every write to it
        return torch.tensor([float(value.content)], device="cpu")
    if not has_values(value):
        return None
    with torch._C._DisableTorchDispatch():
        return sampled(value.detach(), WIDTH)


def _compare(now: Tensor, samples: Iterable[Tensor], rows: Iterable[tuple[Gradient, Tensor | None]]) -> None:
    """Move the gradients that have changed, or have not, by what was kept of each."""
    before = torch.cat([kept if old is None else old for (_, old), kept in zip(rows, samples, strict=True)])
    differs = (now != before) & ~(now.isnan() & before.isnan())
    flags = torch.stack([differs, now != 0, now.isfinite() & (now != 0)]).tolist()
    start = 0
    for (gradient, old), kept in zip(rows, samples, strict=True):
        end = start + kept.numel()
        changed, filled, telling = (any(flag[start:end]) for flag in flags)
        start = end
        gradient.sure = old is not None and telling and not changed
        cause = _meaning(gradient, changed, filled)
        if cause is not None:
            gradient.state = gradient.state.after(cause)[0]


def _meaning(gradient: Gradient, changed: bool, filled: bool) -> Cause | None:
    kind = gradient.state.kind
    if not filled and (changed or kind in _LOOKED_AT):
        value = gradient.value
        value = getattr(value, "_local_tensor", value)
        if value is not None and (isinstance(value, CudaTensor) or not bool(value.detach().any())):
            return Cause.CLEARED
    if changed:
        return Cause.WRITTEN
    return Cause.SEEN if gradient.sure and kind is Kind.USED else None


def move(
    gradients: Iterable[Gradient],
    cause: Cause | Callable[[State], Cause],
    marks: frozenset[Mark] = frozenset(),
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
