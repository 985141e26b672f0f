"""Writes to gradients while they carry a scale.

Between the end of a scaled backward pass and ``unscale_`` every operation that writes to a gradient, or makes
something out of one, is judged by whether it commutes with the scale. Tensors made out of scaled gradients
are followed: *linear* ones carry the scale as the gradients do, all others do not.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilefit.precision.events import GradientsClipped, GradientsWritten
from tilefit.precision.ledger import EMPTY, PLAIN, Gradient, Ledger, Marks
from tilefit.precision.look import Call, Observer, is_plain, mutated
from tilefit.precision.recorder import Recorder

#: What makes a linear result out of one gradient, or several.
_LINEAR = frozenset(
    """view _unsafe_view reshape _reshape_alias flatten ravel alias detach clone _to_copy to copy_ _copy
    contiguous t transpose permute slice select narrow squeeze unsqueeze expand expand_as split
    split_with_sizes chunk unbind as_strided cat stack neg neg_ sum mean _foreach_copy_ _foreach_neg
    _foreach_neg_ view_as_real view_as_complex pin_memory index_select gather allreduce_ reduce_scatter_
    allgather_ broadcast_
    _reduce_scatter_base_ _allgather_base_ all_reduce wait_tensor reduce_ lift_fresh copy""".split()
)
#: Multiplications: linear where the other factor is not made out of gradients.
_PRODUCTS = frozenset(
    """mul mul_ div div_ _foreach_mul _foreach_mul_ _foreach_div _foreach_div_ true_divide""".split()
)
#: Sums: linear where every term is.
_SUMS = frozenset(
    "add add_ sub sub_ _foreach_add _foreach_add_ _foreach_sub _foreach_sub_ lerp lerp_".split()
)
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
        linear: It carries the scale as they do; ``factor`` is what it was multiplied by since.
        operation, source: What made it, if it is not linear.
        marks: The gradients' marks.
    """

    reference: weakref.ref[Tensor]
    linear: bool
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
        if call.backward or not self._starts or self._ledger.in_use or not self._ledger.open:
            return
        targets = self._targets[call.func]
        inputs = call.tensors()
        found = [self._find(tensor) for tensor in inputs]
        if not any(found):
            return
        if targets:
            self._written(call, targets)
            return
        if call.name in _READS:
            self._read_from_gradients = True
            return
        self._follow(call, [one for one in found if one is not None])

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

    # ---- making something out of gradients -------------------------------------------------

    def _follow(self, call: Call, found: list[Gradient | _Derived]) -> None:
        linear, factor = self._is_linear(call, found)
        marks: Marks = frozenset().union(*(one.marks or () for one in found))
        failed = next((one for one in found if isinstance(one, _Derived) and not one.linear), None)
        for out in _outputs(call.out):
            if not is_plain(out) or not out.is_floating_point():
                continue
            if out.numel() and self._gradient_at(out.data_ptr()) is not None:
                continue  # a view
            self._derived[id(out)] = _Derived(
                weakref.ref(out),
                linear,
                marks,
                factor,
                failed.operation if failed else "" if linear else call.name,
                failed.source if failed else "" if linear else call.source,
            )

    def _is_linear(self, call: Call, found: list[Gradient | _Derived]) -> tuple[bool, float]:
        """Whether the result carries the scale as the inputs do, and what it was multiplied by."""
        if any(isinstance(one, _Derived) and not one.linear for one in found):
            return False, 1.0
        factor = next((one.factor for one in found if isinstance(one, _Derived)), 1.0)
        if call.name in _LINEAR:
            return True, factor
        if call.name in _PRODUCTS:
            other = call.args[1] if len(call.args) > 1 else None
            others = other if isinstance(other, list | tuple) else [other]
            if any(isinstance(one, Tensor) and self._find(one) is not None for one in others):
                return False, 1.0
            return True, factor * self._by(call, other)
        if call.name in _SUMS:
            return all(self._find(t) is not None for t in call.tensors()), factor
        return False, 1.0

    def _by(self, call: Call, other: Any) -> float:
        """The number a product multiplies by; 1 where it is none. Waits for the device."""
        if isinstance(other, Tensor) and other.numel() == 1 and is_plain(other):
            # The mode is not active here, so this is not seen as an operation of the user's.
            other = float(other)
        if not isinstance(other, int | float) or not other:
            return 1.0
        return 1 / other if "div" in call.name else float(other)

    # ---- writing to gradients --------------------------------------------------------------

    def _written(self, call: Call, targets: tuple[int, ...]) -> None:
        values = [
            tensor
            for index in targets
            for tensor in _outputs(call.args[index] if index < len(call.args) else None)
        ]
        gradients = [
            gradient
            for tensor in values
            if is_plain(tensor)
            and tensor.numel()
            and (gradient := self._gradient_at(tensor.data_ptr())) is not None
            and gradient.scaled
            and not gradient.consumed
        ]
        if not gradients:
            self._written_elsewhere(call, values)
            return
        marks = gradients[0].marks
        if call.name in _CLEARS or self._overwrites_with_zero(call):
            self._accept(gradients, EMPTY)
            return
        scale = self._ledger.scale_of(marks)
        if call.name in _PRODUCTS:
            self._multiplied(call, gradients, scale)
            return
        others = [t for i, t in _numbered(call) if i not in targets]
        found = [self._find(other) for other in others]
        linear = call.name in _LINEAR or call.name in _SUMS
        if linear and others and all(_carries(one) for one in found):
            self._accept(gradients, marks)
            return
        if call.name in _LINEAR and not others:
            self._accept(gradients, marks)
            return
        if call.name in ("masked_fill_", "index_fill_") and not any(call.args[2:]):
            self._accept(gradients, marks)
            return
        self._changed(call, gradients, scale)

    def _multiplied(self, call: Call, gradients: list[Gradient], scale: float) -> None:
        other = call.args[1] if len(call.args) > 1 else None
        factors = [
            f for f in (other if isinstance(other, list | tuple) else [other]) if isinstance(f, Tensor)
        ]
        if any(self._find(factor) is not None for factor in factors):
            self._clipped(call, gradients, scale, certain=True)
            return
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
        source, operation, count = call.source, call.name, len(gradients)
        self._recorder.emit_once(
            ("written", source, operation),
            lambda: GradientsWritten(source=source, operation=operation, scale=scale, parameters=count),
        )
        self._accept(gradients, gradients[0].marks)

    def _written_elsewhere(self, call: Call, values: list[Tensor]) -> None:
        """Something that is no gradient was written to from one: it is made out of gradients now."""
        found = [one for t in call.tensors() if (one := self._find(t)) is not None]
        linear, factor = self._is_linear(call, found)
        marks: Marks = frozenset().union(*(one.marks or () for one in found))
        for value in values:
            self._derived[id(value)] = _Derived(
                weakref.ref(value),
                linear,
                marks,
                factor,
                "" if linear else call.name,
                "" if linear else call.source,
            )

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
            if derived.linear:
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
            gradient.accept(marks)

    def _overwrites_with_zero(self, call: Call) -> bool:
        return call.name == "fill_" and len(call.args) > 1 and call.args[1] == 0


def _same(event: GradientsWritten) -> GradientsWritten:
    return event


def _carries(found: Gradient | _Derived | None) -> bool:
    return isinstance(found, Gradient) or (found is not None and found.linear)


def _is_average(by: float) -> bool:
    inverse = 1 / by
    return abs(inverse) <= _AVERAGE and (abs(inverse - round(inverse)) < 1e-6 or abs(by - round(by)) < 1e-9)


def _outputs(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [item for item in out if isinstance(item, Tensor)] if isinstance(out, list | tuple) else []


def _numbered(call: Call) -> list[tuple[int, Tensor]]:
    """The tensors among the positional arguments, each with its position."""
    return [(index, tensor) for index, argument in enumerate(call.args) for tensor in _outputs(argument)]
