"""Writes to gradients while they carry a scale.

Between the end of a scaled backward pass and ``unscale_`` every operation that writes to a gradient, or makes
something out of one, is judged by whether it commutes with the scale: by the degree in which the result grows
with the gradients.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilefit.precision.degrees import base_name, result_degree
from tilefit.precision.events import GradientsClipped, GradientsWritten
from tilefit.precision.ledger import EMPTY, PLAIN, Gradient, Ledger, Marks
from tilefit.precision.look import OPEN, Call, Observer, is_plain, mutated, tensors_in
from tilefit.precision.recorder import Recorder

#: Multiplications, by which a gradient may be clipped, averaged or unscaled.
_SCALINGS = frozenset("mul div true_divide".split())
_CLEARS = frozenset("zero_ _foreach_zero_".split())
#: Reads that leave the device or make a mask: the value is not a tensor any more.
_READS = frozenset("_local_scalar_dense item equal".split())
#: The scaler's own: it divides, or by 1 only looks for inf.
_SCALERS_OWN = frozenset("_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_".split())
_NEAR = 1e-4
#: A factor whose inverse is a whole number up to this is an average, not a clipping coefficient.
_AVERAGE = 1 << 20


@dataclass(slots=True)
class _Derived:
    """A tensor made out of scaled gradients.

    Attributes:
        reference: The tensor.
        degree: The power of the scale it grows with; NaN for none.
        marks: The gradients' marks.
        factor: What a tensor of degree 1 was multiplied by since.
        operation, source: What made it lose its degree.
    """

    reference: weakref.ref[Tensor]
    degree: float
    marks: Marks
    factor: float = 1.0
    operation: str = ""
    source: str = ""


class Window(Observer):
    """Follows what happens to scaled gradients.

    Args:
        recorder: Where events go.
        ledger: Holds the gradients' marks.
    """

    phases = (OPEN,)

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._targets: dict[Any, tuple[int, ...]] = {}
        self._derived: dict[int, _Derived] = {}
        self._starts: list[int] = []
        self._held: list[Gradient] = []
        self._read_from_gradients = False
        ledger.on_backward.append(self._on_backward)

    def _on_backward(self, roots: Any) -> None:
        # Inside a backward pass nothing is looked at; afterwards there may be new gradients.
        self._derived.clear()
        self._read_from_gradients = False
        self._starts, self._held = [], []
        if roots is not None or not self._ledger.open:
            return
        found = [
            (value.data_ptr(), gradient)
            for gradient in self._ledger.gradients
            if (value := gradient.value) is not None and is_plain(value) and value.numel()
        ]
        found.sort(key=lambda pair: pair[0])
        self._starts = [start for start, _ in found]
        self._held = [gradient for _, gradient in found]

    def wants(self, func: Any, name: str) -> bool:
        self._targets[func] = mutated(func)
        return name not in _SCALERS_OWN

    def after(self, call: Call) -> None:
        if not self._starts or self._ledger.in_use:
            return
        found = [one for tensor in call.tensors() if (one := self._find(tensor)) is not None]
        if not found:
            return
        if call.name in _READS:
            self._read_from_gradients = True
            return
        targets = [
            tensor
            for index in self._targets[call.func]
            if index < len(call.args)
            for tensor in tensors_in([call.args[index]])
        ]
        gradients = self._scaled_among(targets)
        if gradients:
            self._written(call, gradients)
        else:
            self._follow(call, found, targets)

    # ---- what a tensor is ------------------------------------------------------------------

    def _find(self, tensor: Tensor) -> Gradient | _Derived | None:
        """The scaled gradient a tensor is, or lies in; or what it was made of."""
        derived = self._derived.get(id(tensor))
        if derived is not None and derived.reference() is tensor:
            return derived
        if not is_plain(tensor) or not tensor.numel():
            return None
        gradient = self._gradient_at(tensor.data_ptr())
        return gradient if gradient is not None and gradient.scaled else None

    def _gradient_at(self, address: int) -> Gradient | None:
        """The gradient whose memory holds an address."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        gradient = self._held[index]
        value = gradient.value
        if value is None:
            return None
        start = value.data_ptr()
        return gradient if start <= address < start + value.numel() * value.element_size() else None

    def _scaled_among(self, tensors: list[Tensor]) -> list[Gradient]:
        return [
            gradient
            for tensor in tensors
            if is_plain(tensor)
            and tensor.numel()
            and (gradient := self._gradient_at(tensor.data_ptr())) is not None
            and gradient.scaled
            and not gradient.consumed
        ]

    def _degree_of(self, tensor: Tensor) -> float | None:
        found = self._find(tensor)
        return found.degree if isinstance(found, _Derived) else None if found is None else 1.0

    # ---- making something out of gradients -------------------------------------------------

    def _follow(self, call: Call, found: list[Gradient | _Derived], targets: list[Tensor]) -> None:
        """Know of the results what they are made of."""
        args = call.args
        if targets and self._find(targets[0]) is None:
            if base_name(call.name) != "copy":
                return  # added to something unknown: the sum is unknown
            args = args[1:]  # what was there is gone
        degree = result_degree(call.name, args, self._degree_of)
        derived = [one for one in found if isinstance(one, _Derived)]
        lost = next((one for one in derived if one.degree != one.degree), None)
        factor = derived[0].factor if derived else 1.0
        if base_name(call.name) in _SCALINGS and len(args) > 1:
            factor *= self._by(call, args[1])
        marks: Marks = frozenset().union(*(one.marks or () for one in found))
        for out in targets or tensors_in([call.out]):
            if not out.is_floating_point() or not is_plain(out) or not out.numel():
                continue
            if self._gradient_at(out.data_ptr()) is not None:
                continue  # a view of a gradient
            operation, source = (lost.operation, lost.source) if lost else (call.name, "")
            if degree != 1 and not source:
                source = call.source
            self._derived[id(out)] = _Derived(weakref.ref(out), degree, marks, factor, operation, source)

    def _by(self, call: Call, other: Any) -> float:
        """The number a product multiplies by; 1 where it is none. Waits for the device."""
        if isinstance(other, Tensor) and other.numel() == 1 and is_plain(other):
            # The mode is not active here, so this is not seen as an operation of the user's.
            other = float(other)
        if not isinstance(other, int | float) or not other:
            return 1.0
        return 1 / other if "div" in call.name else float(other)

    # ---- writing to gradients --------------------------------------------------------------

    def _written(self, call: Call, gradients: list[Gradient]) -> None:
        marks = gradients[0].marks
        if call.name in _CLEARS or (call.name == "fill_" and call.args[1] == 0):
            self._accept(gradients, EMPTY)
            return
        args = call.args
        if base_name(call.name) == "copy":
            args = args[1:]
            sources = tensors_in(args)
            if not any(self._find(source) for source in sources):
                self._accept(gradients, None)  # from somewhere unknown
                return
        degree = result_degree(call.name, args, self._degree_of)
        scale = self._ledger.scale_of(marks)
        if base_name(call.name) in _SCALINGS:
            self._multiplied(call, gradients, scale, degree)
        elif degree == 1:
            self._accept(gradients, marks)
        else:
            self._changed(call, gradients, scale)

    def _multiplied(self, call: Call, gradients: list[Gradient], scale: float, degree: float) -> None:
        if degree != 1:
            self._clipped(call, gradients, scale, certain=True)
            return
        other = call.args[1]
        by = self._by(call, other)
        if abs(by * scale - 1) < _NEAR:
            self._accept(gradients, PLAIN)
            return
        if self._read_from_gradients and isinstance(other, int | float) and not _is_average(by):
            self._clipped(call, gradients, scale, certain=False)
        self._accept(gradients, gradients[0].marks)

    def _clipped(self, call: Call, gradients: list[Gradient], scale: float, *, certain: bool) -> None:
        source = call.source
        self._recorder.emit_once(
            ("clipped", source),
            lambda: GradientsClipped(source=source, limit=None, scale=scale, certain=certain),
        )
        self._accept(gradients, gradients[0].marks)

    def _changed(self, call: Call, gradients: list[Gradient], scale: float) -> None:
        source, operation, number = call.source, call.name, len(gradients)
        self._recorder.emit_once(
            ("written", source, operation),
            lambda: GradientsWritten(source=source, operation=operation, scale=scale, parameters=number),
        )
        self._accept(gradients, gradients[0].marks)

    def replaced(self, gradients: Iterable[Gradient]) -> None:
        """Judge gradients that were replaced by a new tensor, before they are used."""
        if not self._derived:
            return
        for gradient in gradients:
            parameter = gradient.parameter()
            value = None if parameter is None else parameter.grad
            derived = self._derived.get(id(value)) if value is not None else None
            if derived is None or derived.reference() is not value or not derived.marks:
                continue
            if gradient.value is value:
                continue
            scale = self._ledger.scale_of(derived.marks)
            if derived.degree == 1:
                gradient.accept(PLAIN if abs(derived.factor * scale - 1) < _NEAR else derived.marks)
                gradient.fresh = True
                continue
            event = GradientsWritten(
                source=derived.source, operation=derived.operation, scale=scale, parameters=1
            )
            self._recorder.emit_once(("written", event.source, event.operation), partial(_same, event))
            gradient.accept(derived.marks)
            gradient.fresh = True

    def _accept(self, gradients: list[Gradient], marks: Marks | None) -> None:
        for gradient in gradients:
            gradient.written(marks)


def _same(event: GradientsWritten) -> GradientsWritten:
    return event


def _is_average(by: float) -> bool:
    inverse = 1 / by
    return abs(inverse) <= _AVERAGE and (abs(inverse - round(inverse)) < 1e-6 or abs(by - round(by)) < 1e-9)
