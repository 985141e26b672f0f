"""What-if: a step run under autocast, by PyTorch's rules for CUDA."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

from tilefit.ops import BACKWARD_WEIGHT, FORWARD, OPTIMIZER, Site, Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.operations import by_name
from tilefit.rules.base import Edits
from tilefit.rules.flow import copy_op, is_add, tensor_bytes

_LISTS = by_name("autocast")
# Names of kernels, as those of the functions that autocast knows.
_KERNEL = re.compile(r"^aten\._*(?:native_|fused_)?|(?:_kernel)?(?:_forward|_backward(?:_data)?)?_*$")


def under_autocast(step: Step, half: str) -> Edits:
    """The operations that autocast to ``half`` changes, with the casts it adds, by index.

    The element type of every tensor is followed through the step: products make half results, what is on
    autocast's fp32 lists makes fp32, and other operations keep the widest type of their operands. A gradient
    has the type of what it is the gradient of.
    """
    replaced = _Autocast(step, half).run()
    return _with_scaler(step, replaced) if half == "fp16" else replaced


def in_fp16(step: Step) -> Edits:
    """What autocast to fp16 changes of a step under bf16 autocast: element types, and the scaler added."""
    return _with_scaler(step, in_types(step, {"bf16": "fp16"}))


def in_types(step: Step, types: Mapping[str, str]) -> Edits:
    """The operations that are others where every tensor of a type is of another: those, and their bytes."""
    changed = (_in_types(entry, types) for entry in step.ops)
    pairs = enumerate(zip(step.ops, changed, strict=True))
    return {index: (new,) for index, (old, new) in pairs if new != old}


def _in_types(entry: StepOp, types: Mapping[str, str]) -> StepOp:
    def exchanged(what: Any) -> Any:
        values = ((each.name, getattr(what, each.name)) for each in fields(what))
        return replace(what, **{name: types[value] for name, value in values if value in types})

    inputs, outputs = (tuple(map(exchanged, refs)) for refs in (entry.inputs, entry.outputs))
    op = exchanged(entry.op)
    if isinstance(op, Streaming):
        op = _moving(op, entry, inputs, outputs)
    return replace(entry, op=op, inputs=inputs, outputs=outputs)


def _moving(
    op: Streaming, entry: StepOp, inputs: Sequence[TensorRef], outputs: Sequence[TensorRef]
) -> Streaming:
    """An operation with the bytes of other operands and results than an entry's; by its own type where those
    are not told, as of a multi-tensor operation."""
    sides = (op.read_bytes, entry.inputs, inputs), (op.write_bytes, entry.outputs, outputs)
    ratio = size_bytes(op.dtype) / size_bytes(entry.op.dtype)
    read_bytes, write_bytes = (_scaled(*side, ratio) for side in sides)
    return replace(op, read_bytes=read_bytes, write_bytes=write_bytes)


class _Autocast:
    def __init__(self, step: Step, half: str) -> None:
        self.step = step
        self.half = half
        self.dtypes: dict[int, str] = {}
        self.copies: dict[tuple[int, str], TensorRef] = {}  # casts, by what is cast and into what
        #: What forward operations turned into another type, by their site and name, and its elements: its own
        #: type, and the activations beside it, one of which its gradient is computed from.
        self.turned: dict[tuple[Site, str, int], list[tuple[str, set[int]]]] = defaultdict(list)
        self.next_id = 1 + max((ref.id for e in step.ops for ref in (*e.inputs, *e.outputs)), default=0)

    def run(self) -> Edits:
        entries = ((i, entry) for i, entry in enumerate(self.step.ops) if entry.phase != OPTIMIZER)
        pairs = ((index, entry, self._changed(entry)) for index, entry in entries)
        return {index: changed for index, entry, changed in pairs if changed != (entry,)}

    def _changed(self, entry: StepOp) -> tuple[StepOp, ...]:
        op = entry.op
        if op.dtype not in ("fp32", "tf32"):
            return (entry,)
        now = [replace(ref, dtype=self.dtypes.get(ref.id, ref.dtype)) for ref in entry.inputs]
        listed = _LISTS.get(_name(entry), "")
        reads_half = listed == "fp32_by_dtype" and not (op.category == "softmax" and self.half == "bf16")
        before: list[StepOp] = []
        if op.multiplies or listed == "lower_precision":
            out = self.half
            inputs = [self._cast(entry, ref, out, before) for ref in now]
        elif listed.startswith("fp32"):
            out = "fp32"
            inputs = now if reads_half else [self._cast(entry, ref, out, before) for ref in now]
        elif entry.phase != FORWARD and is_add(entry) and self.half in {ref.dtype for ref in now}:
            out = self.half  # gradients of a tensor, of its type
            inputs = [self._copied(entry, ref, out, before) if ref.dtype == "fp32" else ref for ref in now]
        else:
            inputs, out = now, self._promoted(entry, now)
        if listed and entry.phase != FORWARD:  # autograd's own run without autocast, on what was saved
            out = self._promoted(entry, inputs)
        activations = [ref for ref in now if not ref.parameter] if entry.phase == FORWARD else []
        for ref in activations:
            if ref.dtype in ("fp32", self.half) and ref.dtype != out:
                beside = {other.id for other in activations} - {ref.id}
                self.turned[entry.site, _name(entry), ref.elements].append((ref.dtype, beside))
        after: list[StepOp] = []
        outputs = [self._made(entry, ref, out, after) for ref in entry.outputs]
        if isinstance(op, Streaming):
            op = _moving(op, entry, inputs, outputs)
            # As where a step is captured: its kernels' time was learnt by the type of what is largest.
            largest = max((*inputs, *outputs), key=lambda ref: ref.elements, default=None)
            out = largest.dtype if largest else out
        op = replace(op, dtype=out)  # type: ignore[type-var]
        changed = replace(entry, op=op, inputs=tuple(inputs), outputs=tuple(outputs))
        return (*before, changed, *after)

    def _cast(self, entry: StepOp, ref: TensorRef, dtype: str, before: list[StepOp]) -> TensorRef:
        """An operand in another type, cast where that was not done yet."""
        if not ref.shape or ref.dtype == dtype or ref.dtype not in ("fp32", self.half):
            return ref
        known = self.copies.get((ref.id, dtype))
        if known is None and entry.phase != FORWARD and not entry.op.multiplies:
            return ref
        if known is None:
            known = self.copies[ref.id, dtype] = self._copied(entry, ref, dtype, before)
        return replace(known, shape=ref.shape)

    def _copied(self, entry: StepOp, ref: TensorRef, dtype: str, into: list[StepOp]) -> TensorRef:
        result = self._new(ref, dtype)
        into.append(_copy(entry, ref, result))
        return result

    def _new(self, ref: TensorRef, dtype: str) -> TensorRef:
        self.next_id += 1
        return replace(ref, id=self.next_id - 1, dtype=dtype)

    def _made(self, entry: StepOp, ref: TensorRef, dtype: str, after: list[StepOp]) -> TensorRef:
        """A result in the type that it is made in; a gradient is then cast into its own."""
        if ref.dtype != "fp32":
            return ref
        own = dtype
        if entry.phase == BACKWARD_WEIGHT:
            own = "fp32"
        elif entry.phase != FORWARD and not is_add(entry):
            reads = {other.id for other in entry.inputs}
            turned = self.turned.get((entry.site, _name(entry), ref.elements), ())
            own = next((kind for kind, beside in turned if not beside or beside & reads), dtype)
        self.dtypes[ref.id] = own
        if own == dtype:
            return replace(ref, dtype=dtype)
        made = self._new(ref, dtype)
        after.append(_copy(entry, made, replace(ref, dtype=own)))
        return made

    def _promoted(self, entry: StepOp, inputs: list[TensorRef]) -> str:
        if "batch_norm" in entry.name:  # keeps statistics and weights in fp32
            return max(inputs, key=lambda ref: ref.elements).dtype
        # A bias that is added to what a layer's product made is cast with the weight.
        own = is_add(entry) and entry.parameter.endswith("bias")
        counted = (ref for ref in inputs if ref.shape and ref.elements and not (own and ref.parameter))
        return self.half if {"fp32", self.half} & {ref.dtype for ref in counted} == {self.half} else "fp32"


def _copy(entry: StepOp, source: TensorRef, result: TensorRef) -> StepOp:
    """A cast beside an operation."""
    return StepOp(copy_op(source, result), entry.phase, entry.site, "aten._to_copy", (source,), (result,))


def _name(entry: StepOp) -> str:
    """What the function is called that an operation, or its gradient, is of; all products are one."""
    return "" if entry.op.multiplies else _KERNEL.sub("", entry.name)


def _scaled(moved: int, old: Iterable[TensorRef], new: Iterable[TensorRef], ratio: float) -> int:
    before = tensor_bytes(old)
    return round(moved * (tensor_bytes(new) / before if before else ratio))


def _with_scaler(step: Step, replaced: Edits) -> Edits:
    """With the gradient scaler, which divides every gradient by the scale before the optimizer runs."""
    first = next((i for i, entry in enumerate(step.ops) if entry.phase == OPTIMIZER), None)
    trained = [(prod(p.shape), size_bytes(p.dtype)) for p in step.parameters.values() if p.trainable]
    if first is None or not trained or not step.settings.training:
        return replaced
    moved = sum(elements * size for elements, size in trained)
    op = Streaming("optimizer", sum(elements for elements, _ in trained), moved, moved)
    entry = step.ops[first]
    scaler = StepOp(op, OPTIMIZER, entry.site, "aten._amp_foreach_non_finite_check_and_unscale_")
    return replaced | {first: (scaler, entry)}
