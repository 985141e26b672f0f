"""Where inf and NaN come from: one step with every operation checked."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tilefit.precision.look import Call, Observer
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules.numerics import NonFiniteOrigin
from tilefit.precision.tensors import Notes, has_values, name_of, tensors_in

#: Operations that make or move values without computing: what they hold comes from elsewhere, or is meant.
_INNOCENT = frozenset(
    """full fill fill_ full_like empty empty_like new_full masked_fill masked_fill_ where scalar_tensor
    zeros ones zeros_like ones_like new_zeros new_ones lift_fresh""".split()
)


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
        self._flags: Notes[Tensor] = Notes()
        #: Of each result: whether its inputs and itself are finite, on the device; and where it was.
        self._checked: list[tuple[list[Tensor], Tensor, NonFiniteOrigin]] = []
        self._inputs: list[Tensor] = []
        flags = [_finite(weight) for weight in weights if has_values(weight)]
        self._weights = torch.stack([flag.cpu() for flag in flags]).all() if flags else None

    def wants(self, func: Any, name: str) -> bool:
        return True

    def before(self, call: Call) -> None:
        # Now, as the operation may write to them.
        self._inputs = [
            _finite(tensor) if (flag := self._flags.of(tensor)) is None else flag
            for tensor in call.tensors()
            if has_values(tensor)
        ]

    def after(self, call: Call) -> None:
        for tensor in call.targets:
            self._flags.pop(id(tensor), None)
        if call.backward and not (self._backward or call.look.recomputes):
            return
        phase = "backward" if call.backward else "forward"
        for out in tensors_in([call.out]):
            if has_values(out):
                flag = self._flags.note(out, _finite(out))
                if call.name not in _INNOCENT:
                    place, dtype = (call.source, call.module), name_of(out.dtype)
                    event = NonFiniteOrigin(*place, operation=call.name, phase=phase, dtype=dtype)
                    self._checked.append((self._inputs, flag, event))

    def end(self) -> None:
        if self.armed and self._weights is not None and not bool(self._weights):
            self._recorder.emit(NonFiniteOrigin(operation="weights"))
        elif self.armed:
            # In order, so the first is the origin; waiting operation by operation is what such a step is for.
            origins = (
                event for inputs, out, event in self._checked if not bool(out) and all(map(bool, inputs))
            )
            for event in islice(origins, 1):
                self._recorder.emit(event)
        self._flags.clear()
        self._checked.clear()


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; waits for the device."""
    return not has_values(tensor) or bool(_finite(tensor))


def _finite(tensor: Tensor) -> Tensor:
    """Whether all values are finite, without a mask in between: an aminmax lets NaN through."""
    low, high = tensor.detach().aminmax()
    return torch.isfinite(low) & torch.isfinite(high)
