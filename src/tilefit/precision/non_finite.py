"""Where inf and NaN come from: one step with every operation checked."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefit.precision.events import NonFinite
from tilefit.precision.look import Call, Observer
from tilefit.precision.recorder import Recorder
from tilefit.precision.tensors import has_values, name_of, targets, tensors_in

#: Operations that make or move values without computing: what they hold comes from elsewhere, or is meant.
_INNOCENT = frozenset(
    """full fill fill_ full_like empty empty_like new_full masked_fill masked_fill_ where scalar_tensor
    zeros ones zeros_like ones_like new_zeros new_ones lift_fresh""".split()
)


@dataclass(slots=True)
class _Checked:
    """One operation: flags on the device, and where it was."""

    finite_in: list[Tensor]
    finite_out: Tensor
    event: NonFinite


class Origin(Observer):
    """Finds the first operation that makes inf or NaN.

    Args:
        recorder: Where events go.
        weights: The parameters, which may hold inf or NaN from the start.
        backward: Backward operations count too; not while a scale is at work, whose overflows are normal.
        armed: Say what is found. It may be armed as late as at the end of the step, once it is known that inf
            or NaN did harm.
    """

    def __init__(self, recorder: Recorder, weights: Iterable[Tensor], *, backward: bool, armed: bool) -> None:
        self.armed = armed
        self._recorder = recorder
        self._backward = backward
        self._flags: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._checked: list[_Checked] = []
        self._inputs: list[Tensor] = []
        flags = [_finite(weight) for weight in weights if has_values(weight)]
        self._weights = torch.stack([flag.cpu() for flag in flags]).all() if flags else None

    def wants(self, func: Any, name: str) -> bool:
        return True

    def before(self, call: Call) -> None:
        # Now, as the operation may write to them.
        self._inputs = [self._flag(tensor) for tensor in call.tensors() if has_values(tensor)]

    def after(self, call: Call) -> None:
        for tensor in targets(call.func, call.args, call.kwargs):
            self._flags.pop(id(tensor), None)
        if call.backward and not (self._backward or call.look.recomputes):
            return
        outs = [t for t in tensors_in([call.out]) if has_values(t)]
        if not outs:
            return
        known = self._inputs
        for out in outs:
            flag = _finite(out)
            self._flags[id(out)] = weakref.ref(out), flag
            if call.name not in _INNOCENT:
                event = NonFinite(
                    source=call.source,
                    module=call.module,
                    operation=call.name,
                    phase="backward" if call.backward else "forward",
                    dtype=name_of(out.dtype),
                )
                self._checked.append(_Checked(known, flag, event))

    def _flag(self, tensor: Tensor) -> Tensor:
        known = self._flags.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self._flags[id(tensor)] = weakref.ref(tensor), _finite(tensor)
        return known[1]

    def end(self) -> None:
        if self.armed:
            self._judge()
        self._flags.clear()
        self._checked.clear()

    def _judge(self) -> None:
        if self._weights is not None and not bool(self._weights):
            self._recorder.emit(NonFinite(operation="weights", phase="", dtype=""))
            return
        # In order, so the first is the origin; waiting operation by operation is what such a step is for.
        for one in self._checked:
            if not bool(one.finite_out) and all(map(bool, one.finite_in)):
                self._recorder.emit(one.event)
                break


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; waits for the device."""
    return not has_values(tensor) or bool(_finite(tensor))


def _finite(tensor: Tensor) -> Tensor:
    """Whether all values are finite, without a mask in between: an aminmax lets NaN through."""
    low, high = tensor.detach().aminmax()
    return torch.isfinite(low) & torch.isfinite(high)
