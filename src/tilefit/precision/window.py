"""Writes to gradients between the backward pass and the step.

On steps that are looked at closely every operation that writes to a gradient, or makes something out of a
scaled one, is judged by whether it commutes with the scale: by the degree in which the result grows with the
gradients.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilefit.precision.degrees import base_name, result_degree
from tilefit.precision.events import Event, GradientsClipped, GradientsWritten, WrongDivision
from tilefit.precision.gradients import Gradient
from tilefit.precision.ledger import NEAR, Begins, Ended, Gave, Ledger, Marks
from tilefit.precision.lines import user_line
from tilefit.precision.look import OPEN, Call, Observer
from tilefit.precision.marks import HAND, Cause, State
from tilefit.precision.recorder import Recorder
from tilefit.precision.tensors import has_values, is_plain, targets, tensors_in

#: Multiplications, by which a gradient may be clipped, averaged or unscaled.
_SCALINGS = frozenset("mul div true_divide".split())
_CLEARS = frozenset("zero_ _foreach_zero_ zero".split())
#: Reads that leave the device: the value is not a tensor any more.
_READS = frozenset("_local_scalar_dense item equal".split())
#: The scaler's own: it divides, or by 1 only looks for inf.
_SCALERS_OWN = frozenset("_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_".split())
#: A factor whose inverse is a whole number up to this is an average, not a clipping coefficient.
_AVERAGE = 1 << 20
#: How near the products of a factor and a norm are from step to step, where one is made of the other.
_CONSTANT = 1e-3


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
    """Follows what happens to gradients.

    Args:
        recorder: Where events go.
        ledger: Holds the gradients' states.
    """

    phases = (OPEN,)

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._derived: dict[int, _Derived] = {}
        self._starts: list[int] = []
        self._held: list[Gradient] = []
        #: Numbers read from gradients in this step; and by line, a factor and its products with such numbers.
        self._read: list[float] = []
        self._factors: dict[str, tuple[float, list[float]]] = {}
        #: Gradients, by ``id``, whose loss was multiplied by a constant that was divided out.
        self._undone: set[int] = set()
        #: What each gradient, by ``id``, was multiplied by since the last step.
        self.multiplied: defaultdict[int, float] = defaultdict(lambda: 1.0)
        ledger.before_observing = self._replaced
        recorder.on(Begins, lambda _: self._forget())
        recorder.on(Ended, lambda _: self._begin())
        recorder.on(Gave, self._on_gave)

    def _forget(self) -> None:
        # Inside a backward pass only hooks are looked at; afterwards there may be new gradients.
        if self._ledger.closely:
            self._starts, self._held = [], []

    def end(self) -> None:
        self._derived.clear()
        self._undone.clear()
        self._read.clear()

    def _begin(self) -> None:
        if not self._ledger.closely:
            return  # another thread's
        values = ((g.value, g) for g in self._ledger.gradients)
        found = [(v.data_ptr(), g) for v, g in values if v is not None and is_plain(v) and v.numel()]
        found.sort(key=lambda pair: pair[0])
        self._starts = [start for start, _ in found]
        self._held = [gradient for _, gradient in found]

    def _on_gave(self, gave: Gave) -> None:
        marks = frozenset(mark for mark in gave.marks if mark.scaler != HAND)
        for gradient in gave.gradients if marks and self._ledger.closely else ():
            if isinstance(gradient, Tensor):
                self._derived[id(gradient)] = _Derived(weakref.ref(gradient), 1.0, marks)

    def wants(self, func: Any, name: str) -> bool:
        return name not in _SCALERS_OWN

    def after(self, call: Call) -> None:
        if not (self._starts or self._derived) or self._ledger.here.in_use:
            return
        written = targets(call.func, call.args, call.kwargs)
        gradients = [g for tensor in written if (g := self._gradient(tensor)) is not None]
        if gradients:
            self._written(call, gradients)
            return
        found = [one for tensor in call.tensors() if (one := self._find(tensor)) is not None]
        if call.name not in _READS:
            if found:
                self._follow(call, found, written)
        elif isinstance(call.out, float) and self._starts:
            self._read += (call.out, abs(call.out) ** 0.5)

    # ---- what a tensor is ------------------------------------------------------------------

    def _find(self, tensor: Tensor) -> State | _Derived | None:
        """The scaled gradient a tensor is, or lies in; or what it was made of."""
        derived = self._derived.get(id(tensor))
        if derived is not None and derived.reference() is tensor:
            return derived
        gradient = self._gradient(tensor)
        return gradient.state if gradient is not None and gradient.state.scaled else None

    def _gradient(self, tensor: Tensor) -> Gradient | None:
        """The gradient that a tensor is, or whose memory it lies in."""
        if not self._starts or not is_plain(tensor) or not tensor.numel():
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        gradient = self._held[index]
        value = gradient.value
        if index < 0 or value is None:
            return None
        start = value.data_ptr()
        return gradient if start <= address < start + value.numel() * value.element_size() else None

    def _degree_of(self, tensor: Tensor) -> float | None:
        found = self._find(tensor)
        return found.degree if isinstance(found, _Derived) else None if found is None else 1.0

    # ---- making something out of gradients -------------------------------------------------

    def _follow(self, call: Call, found: list[State | _Derived], written: list[Tensor]) -> None:
        """Know of the results what they are made of."""
        args = call.args
        if written and self._find(written[0]) is None and "out" not in call.kwargs:
            if base_name(call.name) != "copy":
                return  # added to something unknown: the sum is unknown
            args = args[1:]  # what was there is gone
        degree = result_degree(call.name, args, self._degree_of)
        derived = [one for one in found if isinstance(one, _Derived)]
        lost = next((one for one in derived if one.degree != one.degree), None)
        factor = derived[0].factor if derived else 1.0
        if base_name(call.name) in _SCALINGS and len(args) > 1:
            factor *= _by(call, args[1])
        marks: Marks = frozenset().union(*(one.marks for one in found))
        for out in written or tensors_in([call.out]):
            if not has_values(out) or self._gradient(out) is not None:
                continue  # nothing, or a view of a gradient
            operation, source = (lost.operation, lost.source) if lost else (call.name, "")
            if not source and (degree != 1 or factor != 1):
                source = call.source
            self._derived[id(out)] = _Derived(weakref.ref(out), degree, marks, factor, operation, source)

    # ---- writing to gradients --------------------------------------------------------------

    def _written(self, call: Call, gradients: list[Gradient]) -> None:
        name, args = base_name(call.name), call.args
        if call.name in _CLEARS or (name == "fill" and args[1] == 0):
            self._accept(gradients, Cause.CLEARED)
            return
        if name in _SCALINGS and len(args) > 1 and _by(call, args[1], zero=0.0) == 0:
            self._accept(gradients, Cause.CLEARED)
            return
        scaled = [gradient for gradient in gradients if gradient.state.scaled]
        if name == "copy":
            args = args[1:]
            known = [one for source in tensors_in(args) if (one := self._find(source)) is not None]
            if not known:
                self._accept(gradients, Cause.WRITTEN)  # from somewhere unknown
                return
        if not scaled:
            self._written_plain(call, gradients, args)
            return
        degree = result_degree(call.name, args, self._degree_of)
        if name in _SCALINGS:
            self._multiplied(call, scaled, degree)
        else:
            if degree != 1:
                self._changed(call.source, call.name, scaled)
            self._accept(gradients, Cause.KEPT)

    def _written_plain(self, call: Call, gradients: list[Gradient], args: tuple[Any, ...]) -> None:
        """Gradients without a scale may be changed as one likes, except by what carries one."""
        if any(self._find(tensor) is not None for tensor in call.tensors()):
            self._accept(gradients, Cause.WRITTEN)
            return
        if base_name(call.name) not in _SCALINGS:
            constant = gradients[0].state.by_hand
            source, name, number = call.source, call.name, len(gradients)
            self._ledger.wait(
                constant,
                ("written", source),
                lambda: GradientsWritten(source=source, operation=name, scale=constant, parameters=number),
            )
            self._accept(gradients, Cause.KEPT)
            return
        by = _by(call, args[1])
        self._note_product(gradients, by)
        self._ledger.settle(by)
        constant = gradients[0].state.by_hand
        scale = constant if constant and abs(by * constant - 1) < NEAR else self._scale_undone(by)
        if scale and (not constant or id(gradients[0]) in self._undone):
            self._divided(call, gradients, scale)
            return
        if scale:
            self._undone.update(map(id, gradients))
        raised = any(abs(by / s - 1) < NEAR for s in self._scales())
        self._accept(gradients, Cause.WRITTEN if raised else Cause.KEPT)

    def _note_product(self, gradients: list[Gradient], by: float) -> None:
        for gradient in gradients:
            self.multiplied[id(gradient)] *= by

    def _divided(self, call: Call, gradients: list[Gradient], scale: float) -> None:
        """The user's own code divides gradients by a scale."""
        source = call.source

        def make(kind: str, those: list[Gradient], seen: bool) -> Any:
            return ("divided", kind, source), lambda: WrongDivision(
                source=source,
                module="these parameters",
                seen=seen,
                kind=kind,
                scale=scale,
                parameters=len(those),
                by_hand=True,
            )

        here = self._ledger.here
        for gradient in gradients:
            gradient.sure = True  # it is seen right now
        self._ledger.judge(here, gradients, lambda state: Cause.UNSCALED, make)
        for gradient in gradients:
            gradient.accept(ending=True)

    def _scales(self) -> list[float]:
        return [float(scaler.get_scale()) for scaler, _ in self._ledger.scalers]

    def _scale_undone(self, by: float) -> float:
        return next((s for s in self._scales() if s > 1 and abs(by * s - 1) < NEAR), 0.0)

    def _multiplied(self, call: Call, gradients: list[Gradient], degree: float) -> None:
        scale = self._ledger.scale_of(gradients[0].state.marks)
        if degree != 1:
            self._clipped(call.source, scale, certain=True)
            self._accept(gradients, Cause.KEPT)
            return
        by = _by(call, call.args[1])
        self._note_product(gradients, by)
        if abs(by * scale - 1) < NEAR:
            self._divided(call, gradients, scale)
            return
        if isinstance(call.args[1], int | float) and self._is_coefficient(call.source, by):
            self._clipped(call.source, scale, certain=False)
        self._accept(gradients, Cause.KEPT)

    def _is_coefficient(self, source: str, by: float) -> bool:
        """Whether a factor is a number over one read from the gradients, as it was in another step."""
        if _is_average(by) or not self._read:
            return False
        products = [by * value for value in self._read]
        before, earlier = self._factors.setdefault(source, (by, products))
        self._factors[source] = by, products
        return before != by and any(
            abs(one - other) <= _CONSTANT * abs(other) for one in products for other in earlier
        )

    def _clipped(self, source: str, scale: float, *, certain: bool) -> None:
        event = GradientsClipped(source=source, limit=None, scale=scale, certain=certain)
        self._say(("clipped", source), event)

    def _changed(self, source: str, operation: str, gradients: list[Gradient]) -> None:
        scale = self._ledger.scale_of(gradients[0].state.marks)
        event = GradientsWritten(source=source, operation=operation, scale=scale, parameters=len(gradients))
        self._say(("written", source, operation), event)

    def _say(self, key: object, event: Event) -> None:
        self._recorder.emit_once(key, lambda: event)

    def _replaced(self) -> None:
        """Judge gradients that were replaced by a new tensor, before they are used."""
        if not self._derived:
            return
        for gradient in self._ledger.gradients:
            value = gradient.current()
            derived = self._derived.get(id(value)) if value is not None else None
            if derived is None or derived.reference() is not value or gradient.value is value:
                continue
            cause = self._judge_derived(derived)
            del self._derived[id(value)]
            gradient.change()
            gradient.state = State(State().after(Cause.ADD_SAME)[0].kind, derived.marks).after(cause)[0]
            self._ledger.written(self._ledger.here, [gradient])

    def _judge_derived(self, derived: _Derived) -> Cause:
        """Judge what becomes a gradient; what that is to one with its marks."""
        scale = self._ledger.scale_of(derived.marks)
        if derived.degree == 1:
            source = derived.source or user_line()
            if abs(derived.factor * scale - 1) < NEAR:
                return Cause.UNSCALED
            if derived.factor != 1:
                self.multiplied[id(derived)] *= derived.factor
                if self._is_coefficient(source, derived.factor):
                    self._clipped(derived.source or source, scale, certain=False)
            return Cause.KEPT
        event = GradientsWritten(
            source=derived.source, operation=derived.operation, scale=scale, parameters=1
        )
        self._say(("written", event.source, event.operation), event)
        return Cause.KEPT

    def _accept(self, gradients: list[Gradient], cause: Cause) -> None:
        for gradient in gradients:
            gradient.state = gradient.state.after(cause)[0]
            gradient.accept(ending=True)

    # ---- hooks -----------------------------------------------------------------------------

    @contextmanager
    def hook_of(self, parameter: Tensor, gradient: Tensor) -> Iterator[Callable[[Any], None]]:
        """Within the block a hook of the user's runs on a gradient on its way into a parameter's ``.grad``.

        Yields:
            What is to be called with the result.
        """
        ledger = self._ledger
        here = ledger.here
        marks = frozenset(mark for mark in here.reached if mark.scaler != HAND)
        known = ledger.follow(parameter)
        if gradient is parameter.grad:
            if known.change() is not None:
                known.state = known.state.after(known.state.adding(marks), marks)[0]
            self._begin()
        elif marks:
            self._derived[id(gradient)] = _Derived(weakref.ref(gradient), 1.0, marks)

        def gave(result: Any) -> None:
            derived = self._derived.get(id(gradient if result is None else result))
            if derived is None:
                return
            if self._judge_derived(derived) is Cause.UNSCALED:
                here.unscaled.add(id(parameter))

        try:
            yield gave
        finally:
            self._forget()


def _by(call: Call, other: Any, zero: float = 1.0) -> float:
    """The number a product multiplies by; 1 where it is none. Waits for the device."""
    if isinstance(other, Tensor) and other.numel() == 1 and is_plain(other):
        # The mode is not active here, so this is not seen as an operation of the user's.
        other = float(other)
    if not isinstance(other, int | float) or not other:
        return zero if isinstance(other, int | float) else 1.0
    return 1 / other if "div" in call.name else float(other)


def _is_average(by: float) -> bool:
    inverse = 1 / by
    return abs(inverse) <= _AVERAGE and (abs(inverse - round(inverse)) < 1e-6 or abs(by - round(by)) < 1e-9)
