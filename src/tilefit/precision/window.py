"""Writes to gradients between the backward pass and the step.

On steps that are looked at closely every operation that writes to a gradient, or makes something out of a
scaled one, is judged by whether it commutes with the scale: by the degree in which the result grows with the
gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilefit.precision.degrees import base_name, keeps_no_value, result_degree
from tilefit.precision.gradients import Cause, Gradient, Kind, State, move, scales_of
from tilefit.precision.ledger import (
    NEAR,
    Begins,
    Ended,
    Gave,
    Hooked,
    Hooks,
    Marks,
    Scales,
    Tracker,
    scale_of,
)
from tilefit.precision.lines import user_line
from tilefit.precision.look import OPEN, Call, Observer
from tilefit.precision.rules.protocol import ClipOnScaled, PenaltyOnScaled, StepWithoutUnscale
from tilefit.precision.tensors import Notes, is_dense, is_plain, tensors_in

#: Multiplications, by which a gradient may be clipped, averaged or unscaled.
_SCALINGS = frozenset("mul div true_divide".split())
#: Reads that leave the device: the value is not a tensor any more.
_READS = frozenset("_local_scalar_dense item equal".split())
#: The scaler's own: it divides, or by 1 only looks for inf.
_SCALERS_OWN = frozenset("_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_".split())
#: A factor whose inverse is a whole number up to this is an average, not a clipping coefficient.
_AVERAGE = 1 << 20
#: How near the products of a factor and a norm are from step to step, where one is made of the other.
_CONSTANT = 1e-3
#: Times the scale, a factor below this may have divided it out along with something else.
_UNDONE = 16.0


@dataclass(slots=True)
class _Derived:
    """A tensor made out of scaled gradients, or one of them.

    Attributes:
        degree: The power of the scale it grows with; NaN for none.
        marks: The gradients' marks.
        factor: What a tensor of degree 1 was multiplied by since.
        operation, source: What made it lose its degree, or multiplied it.
    """

    degree: float
    marks: Marks
    factor: float = 1.0
    operation: str = ""
    source: str = ""


class Window(Tracker, Observer):
    """Follows what happens to gradients."""

    phases = (OPEN,)

    def set_up(self) -> None:
        self._derived: Notes[_Derived] = Notes()
        #: Tensors that scaled gradients were added to, and what that is where they are copies of weights.
        self._copies: Notes[StepWithoutUnscale] = Notes()
        #: Where these begin in memory, for those that are written to by another name.
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        #: The gradients by where they begin in memory, and that in order.
        self._held: dict[int, Gradient] = {}
        self._starts: list[int] = []
        #: Numbers read from gradients in this step; and by line, a factor and its products with such numbers.
        self._read: list[float] = []
        self._factors: dict[str, tuple[float, list[float]]] = {}
        #: Gradients, by ``id``, whose loss was multiplied by a constant that was divided out.
        self._undone: set[int] = set()
        self._ledger.before_observing = self._replaced

    def on_begins(self, begins: Begins) -> None:
        """Inside a backward pass only hooks are looked at; afterwards there may be new gradients."""
        if self._ledger.closely:
            self._held = {}

    def end(self) -> None:
        for kept in (self._derived, self._copies, self._places, self._undone, self._read):
            kept.clear()

    def on_ended(self, ended: Ended | None) -> None:
        """Find where the gradients are."""
        if not self._ledger.closely:
            return  # another thread's
        values = ((g.value, g) for g in self._ledger.gradients)
        self._held = {v.data_ptr(): g for v, g in values if v is not None and is_dense(v) and v.numel()}
        self._starts = sorted(self._held)

    def on_gave(self, gave: Gave) -> None:
        """Gradients that a backward pass returned are gradients too."""
        marks = scales_of(gave.marks)
        for gradient in gave.gradients if marks and self._ledger.closely else ():
            if isinstance(gradient, Tensor):
                self._derived.note(gradient, _Derived(1.0, marks))

    def on_scales(self, scales: Scales) -> None:
        """What is made of scaled gradients is not to be scaled once more."""
        for tensor in tensors_in((scales.outputs,)) if self._ledger.closely else ():
            found = self._derived.of(tensor)
            if found is not None and found.degree != 0:
                scale = self._ledger.scale_of(found.marks)
                self.found(PenaltyOnScaled, operation=found.operation, scale=scale, parameters=0)

    def wants(self, func: Any, name: str) -> bool:
        return name not in _SCALERS_OWN

    def after(self, call: Call) -> None:
        if not (self._held or self._derived) or self._ledger.here.in_use:
            return
        written = call.targets
        gradients = [g for tensor in written if (g := self._gradient(tensor)) is not None]
        if gradients:
            self._written(call, gradients)
            return
        if self._copies and written and base_name(call.name) == "copy":
            event = self._copies.first(call.tensors())
            if event is not None and self._hold_weights(written):
                self._recorder.emit(event)
        for tensor in written:
            for other in self._places.get(tensor.data_ptr(), ()) if is_dense(tensor) else ():
                if other != id(tensor):
                    self._derived.pop(other, None)  # it is written to through .data, say
        found = [one for tensor in call.tensors() if (one := self._find(tensor)) is not None]
        if call.name not in _READS:
            if found and not keeps_no_value(call.name):
                self._follow(call, found, written)
        elif isinstance(call.out, float) and self._held:
            self._read += (call.out, abs(call.out) ** 0.5)

    # ---- what a tensor is ------------------------------------------------------------------

    def _find(self, tensor: Tensor) -> _Derived | None:
        """What a tensor was made of; or the scaled gradient that it is, or lies in."""
        derived = self._derived.of(tensor)
        if derived is None and (gradient := self._gradient(tensor)) is not None and gradient.state.scaled:
            return _Derived(1.0, gradient.state.marks)
        return derived

    def _gradient(self, tensor: Tensor) -> Gradient | None:
        """The gradient that a tensor is, or whose memory it lies in."""
        if not self._held or not is_dense(tensor) or not tensor.numel():
            return None
        address = tensor.data_ptr()
        gradient = self._held[self._starts[bisect_right(self._starts, address) - 1]]
        value = gradient.value
        within = value is not None and 0 <= address - value.data_ptr() < value.numel() * value.element_size()
        return gradient if within else None

    def _degree_of(self, tensor: Tensor) -> float | None:
        found = self._find(tensor)
        return None if found is None else found.degree

    # ---- making something out of gradients -------------------------------------------------

    def _follow(self, call: Call, found: list[_Derived], written: list[Tensor]) -> None:
        """Know of the results what they are made of."""
        args = call.args
        if written and self._find(written[0]) is None and "out" not in call.kwargs:
            if base_name(call.name) != "copy":
                self._added(call, found[0], written)  # to something unknown: the sum is unknown
                return
            args = args[1:]  # what was there is gone
        degree = result_degree(call.name, args, self._degree_of)
        lost = next((one for one in found if one.degree != one.degree), None)
        factor = next((one.factor for one in found if one.factor != 1), 1.0)
        if base_name(call.name) in _SCALINGS and len(args) > 1:
            factor *= _by(call, args[1])
        marks: Marks = frozenset().union(*(one.marks for one in found))
        factors = [call.kwargs.get("alpha", 1.0), *(one.factor for one in found)]
        # What no scale is on any more may be changed as one likes.
        lose = degree != 1 and not lost and any(self._may_undo(by, marks) for by in factors)
        source = call.source if degree != 1 or factor != 1 else ""
        operation, source = (lost.operation, lost.source or source) if lost else (call.name, source)
        for out in written or tensors_in([call.out]):
            # A view of a gradient is one.
            if not (out.is_floating_point() and is_dense(out) and out.numel()) or self._gradient(out):
                continue
            if lose:
                self._derived.pop(id(out), None)
                continue
            self._derived.note(out, _Derived(degree, marks, factor, operation, source))
            self._places[out.data_ptr()].append(id(out))

    def _added(self, call: Call, one: _Derived, written: list[Tensor]) -> None:
        """Scaled gradients are added to what is none: to weights, which is a step, or to copies of weights,
        which is one once these are copied back."""
        factor = one.factor * call.kwargs.get("alpha", 1.0)
        if base_name(call.name) not in ("add", "sub") or one.degree != 1 or self._may_undo(factor, one.marks):
            return
        scale = self._ledger.scale_of(one.marks)
        event = StepWithoutUnscale(call.source, "this code", scale=scale, lr=abs(factor), by_hand=True)
        if self._hold_weights(written):
            self._recorder.emit(event)
        else:
            for tensor in written:
                self._copies.note(tensor, event)

    def _hold_weights(self, tensors: list[Tensor]) -> bool:
        places = {p.data_ptr() for p in self._ledger.parameters if is_dense(p)}
        return any(tensor.data_ptr() in places for tensor in tensors if is_dense(tensor))

    # ---- writing to gradients --------------------------------------------------------------

    def _written(self, call: Call, gradients: list[Gradient]) -> None:
        name, args = base_name(call.name), call.args
        by = _by(call, args[1], zero=0.0) if name in _SCALINGS and len(args) > 1 else 1.0
        cause = Cause.KEPT
        if name == "zero" or (name == "fill" and args[1] == 0) or by == 0:
            self._accept(gradients, Cause.CLEARED)
            return
        if name == "copy":
            args = args[1:]
            found = self._find(args[0])
            if found is None:
                self._accept(gradients, Cause.WRITTEN)  # from somewhere unknown
                return
            whole = gradients[0].value
            if whole is not None and call.args[0].numel() == whole.numel():
                self._becomes(gradients[0], found)
                return
        scaled = [gradient for gradient in gradients if gradient.state.scaled]
        if not scaled:
            self._written_plain(call, gradients, by)
            return
        marks, degree = scaled[0].state.marks, result_degree(call.name, args, self._degree_of)
        if name not in _SCALINGS:
            self._judge(_Derived(degree, marks, 1.0, call.name, call.source), len(scaled))
        elif degree != 1:
            self._clipped(call.source, marks, certain=True)
        else:
            self._note_product(scaled, by)
            source = call.source if isinstance(args[1], int | float) else ""
            cause = self._judge(_Derived(degree, marks, by, call.name, source))
        if cause is Cause.UNSCALED:
            self._divided(scaled, self._ledger.scale_of(marks))
        else:
            self._accept(gradients, cause)

    def _written_plain(self, call: Call, gradients: list[Gradient], by: float) -> None:
        """Gradients without a scale may be changed as one likes, except by what carries one."""
        constant = gradients[0].state.by_hand
        if any(self._find(tensor) is not None for tensor in call.tensors()):
            self._accept(gradients, Cause.WRITTEN)
            return
        if base_name(call.name) not in _SCALINGS:
            what: dict[str, Any] = {"operation": call.name, "parameters": len(gradients)}
            self._ledger.wait(constant, PenaltyOnScaled(call.source, scale=constant, **what))
            self._accept(gradients, Cause.KEPT)
            return
        self._note_product(gradients, by)
        self._ledger.settle(by)
        if constant and self._is_coefficient(call.source, by):
            clipped = ClipOnScaled(call.source, threshold=None, scale=constant, certain=False)
            self._ledger.wait(constant, clipped)
        scales = [scale_of(scaler) for scaler, _ in self._ledger.scalers]
        undone = [scale for scale in (constant, *scales) if scale > 1 and abs(by * scale - 1) < NEAR]
        if undone and (not constant or id(gradients[0]) in self._undone):
            self._divided(gradients, undone[0])
            return
        self._undone.update(map(id, gradients if undone else ()))
        raised = any(abs(by / scale - 1) < NEAR for scale in scales)
        self._accept(gradients, Cause.WRITTEN if raised else Cause.KEPT)

    def _note_product(self, gradients: list[Gradient], by: float) -> None:
        for gradient in gradients:
            self._ledger.here.cycle.multiplied[id(gradient)] *= by

    def _divided(self, gradients: list[Gradient], scale: float) -> None:
        """The user's own code divides gradients by a scale."""
        figures = {"scale": scale, "by_hand": True}
        for gradient in gradients:
            gradient.sure = True  # it is seen right now
        self._ledger.judge(gradients, Cause.UNSCALED, lambda marks: figures, "these parameters")
        self._ledger.written(gradients, ending=True)

    def _is_coefficient(self, source: str, by: float) -> bool:
        """Whether a factor is a number over one read from the gradients, as it was in another step."""
        if _is_average(by) or not self._read:
            return False
        products = [by * value for value in self._read]
        before, earlier = self._factors.setdefault(source, (by, products))
        self._factors[source] = by, products
        pairs = ((one, other) for one in products for other in earlier)
        return before != by and any(abs(one - other) <= _CONSTANT * abs(other) for one, other in pairs)

    def _clipped(self, source: str, marks: Marks, *, certain: bool) -> None:
        scale = self._ledger.scale_of(marks)
        self._recorder.emit(ClipOnScaled(source, threshold=None, scale=scale, certain=certain))

    def _judge(self, made: _Derived, parameters: int = 1) -> Cause:
        """Judge what gradients become that had its marks; what that is to them. A factor that is not read
        from a number on a line has no source."""
        marks, by = made.marks, made.factor
        scale = self._ledger.scale_of(marks)
        if made.degree != 1:
            what: dict[str, Any] = {"operation": made.operation, "parameters": parameters}
            self._recorder.emit(PenaltyOnScaled(made.source, scale=scale, **what))
            return Cause.KEPT
        if abs(by * scale - 1) < NEAR:
            return Cause.UNSCALED
        if made.source and by != 1 and self._is_coefficient(made.source, by):
            self._clipped(made.source, marks, certain=False)
        return Cause.WRITTEN if self._may_undo(by, marks) else Cause.KEPT

    def _may_undo(self, by: Any, marks: Marks) -> bool:
        """Whether a factor may have divided the scale out, along with an average, say."""
        small = isinstance(by, int | float) and abs(by) <= 0.5
        return small and abs(by) * self._ledger.scale_of(marks) < _UNDONE

    def _replaced(self) -> None:
        """Judge gradients that were replaced by a new tensor, before they are used."""
        for gradient in self._ledger.gradients if self._derived else ():
            parameter = gradient.parameter()
            value = None if parameter is None else parameter.grad
            derived = self._derived.of(value) if value is not None else None
            if value is None or derived is None or gradient.value is value:
                continue
            del self._derived[id(value)]
            gradient.change()
            self._becomes(gradient, derived, ending=False)

    def _becomes(self, gradient: Gradient, derived: _Derived, *, ending: bool = True) -> None:
        """All of a gradient is made anew out of scaled ones."""
        gradient.state = State(Kind.SCALED, derived.marks).after(self._judge_whole(derived))[0]
        self._ledger.written([gradient], ending=ending)

    def _judge_whole(self, derived: _Derived) -> Cause:
        """Judge what becomes a gradient; what that is to one with its marks."""
        derived.source = derived.source or (user_line() if derived.degree == 1 else "")
        cause = self._judge(derived)
        if derived.factor != 1 and derived.degree == 1 and cause is Cause.KEPT:
            self._ledger.here.cycle.multiplied[id(derived)] *= derived.factor
        return cause

    def _accept(self, gradients: list[Gradient], cause: Cause) -> None:
        move(gradients, cause)
        self._ledger.written(gradients, ending=True)

    # ---- hooks -----------------------------------------------------------------------------

    def on_hooks(self, hooks: Hooks) -> None:
        """A hook of the user's begins to run on a gradient on its way into a parameter's ``.grad``."""
        marks = scales_of(self._ledger.here.reached)
        known = self._ledger.follow(hooks.parameter)
        self._held = {}
        if hooks.gradient is hooks.parameter.grad:
            if known.change() is not None:
                known.state = known.state.after(known.state.adding(marks), marks)[0]
            self.on_ended(None)
        elif marks:
            self._derived.note(hooks.gradient, _Derived(1.0, marks))

    def on_hooked(self, hooked: Hooked) -> None:
        """It has run."""
        here, result = self._ledger.here, hooked.result
        derived = self._derived.of(hooked.gradient if result is None else result)
        cause = Cause.WRITTEN if scales_of(here.reached) and result is not None else Cause.KEPT
        if derived is not None:
            cause = self._judge_whole(derived)
        if cause is Cause.UNSCALED:
            here.unscaled.add(id(hooked.parameter))
        here.unknown |= cause is Cause.WRITTEN


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
