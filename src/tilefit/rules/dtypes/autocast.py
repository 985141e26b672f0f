"""What-if: a step run under autocast, by PyTorch's rules for CUDA."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from typing import Any

from tilefit.ops import BACKWARD_WEIGHT, FORWARD, OPTIMIZER, Op, Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.base import Edits
from tilefit.rules.flow import copy_op, tensor_bytes

# Streaming operations whose inputs autocast widens to fp32. Batch normalisation is not among them: it
# takes half inputs and keeps its statistics in fp32 (PyTorch, ATen/autocast_mode.h).
_FP32_ROLES = ("normalization", "loss", "softmax", "reduction")
_FP32_NAMES = (
    "exp",
    "log",
    "log10",
    "log2",
    "log1p",
    "expm1",
    "pow",
    "rsqrt",
    "reciprocal",
    "softplus",
    "tan",
)


def under_autocast(step: Step, half: str) -> Edits:
    """The operations that autocast to ``half`` changes, with the casts it adds, by index.

    The element type of every tensor is followed through the step: products make half results, other
    operations keep the widest type of their operands, and those on autocast's fp32 list make fp32.
    """
    replaced = _Autocast(step, half).run()
    if half == "fp16" and step.settings.training:
        _add_scaler(step, replaced)
    return replaced


def in_fp16(step: Step) -> Edits:
    """What autocast to fp16 changes of a step under bf16 autocast: element types, and the scaler added."""
    changed = (_in_fp16(entry) for entry in step.ops)
    pairs = enumerate(zip(step.ops, changed, strict=True))
    replaced: Edits = {index: (new,) for index, (old, new) in pairs if new != old}
    if step.settings.training:
        _add_scaler(step, replaced)
    return replaced


def _in_fp16(entry: StepOp) -> StepOp:
    inputs, outputs = (tuple(map(_narrow, refs)) for refs in (entry.inputs, entry.outputs))
    return replace(entry, op=_narrow(entry.op), inputs=inputs, outputs=outputs)


def _narrow(what: Any) -> Any:
    """An operation or tensor with fp16 in the place of bf16."""
    return replace(what, **{each.name: "fp16" for each in fields(what) if getattr(what, each.name) == "bf16"})


class _Autocast:
    def __init__(self, step: Step, half: str) -> None:
        self.step = step
        self.half = half
        self.dtypes: dict[int, str] = {}
        self.weights: dict[int, TensorRef] = {}  # cast once, kept by autocast's cache
        self.cast: dict[int, TensorRef] = {}  # half copies of fp32 activations, kept for the backward pass
        self.cast_inputs: set[tuple[str, int]] = set()
        self.next_id = 1 + max((ref.id for e in step.ops for ref in (*e.inputs, *e.outputs)), default=0)

    def run(self) -> Edits:
        replaced = {}
        for index, entry in enumerate(self.step.ops):
            if entry.phase == OPTIMIZER:
                continue
            if not isinstance(entry.op, Streaming):
                changed = self._product(entry)
            else:
                changed = self._streaming(entry, entry.op)
            if changed != (entry,):
                replaced[index] = changed
        return replaced

    def _current(self, ref: TensorRef) -> TensorRef:
        dtype = self.dtypes.get(ref.id, ref.dtype)
        return ref if dtype == ref.dtype else replace(ref, dtype=dtype)

    def _copy(self, entry: StepOp, source: TensorRef, dtype: str) -> tuple[StepOp, TensorRef]:
        result = replace(source, id=self.next_id, dtype=dtype)
        self.next_id += 1
        op = copy_op(source, result)
        return StepOp(op, entry.phase, entry.site, "aten._to_copy", (source,), (result,)), result

    def _product(self, entry: StepOp) -> tuple[StepOp, ...]:
        if entry.op.dtype not in ("fp32", "tf32"):
            return (entry,)
        before: list[StepOp] = []
        inputs = []
        for ref in map(self._current, entry.inputs):
            if ref.dtype == "fp32" and not _is_scalar(ref):
                known = self.weights.get(ref.id) if ref.parameter else None
                if entry.phase != FORWARD:
                    known = known or self.cast.get(ref.id)
                if known is None:
                    copy, known = self._copy(entry, ref, self.half)
                    before.append(copy)
                    if ref.parameter:
                        self.weights[ref.id] = known
                    elif entry.phase == FORWARD:
                        self.cast[ref.id] = known
                        self.cast_inputs.add((entry.site.module, prod(ref.shape)))
                ref = replace(known, shape=ref.shape)
            inputs.append(ref)
        op = _with_dtype(entry.op, self.half)
        after: list[StepOp] = []
        outputs = []
        for ref in entry.outputs:
            if ref.dtype != "fp32":
                outputs.append(ref)
                continue
            made = replace(ref, dtype=self.half)
            # The gradient of a cast casts back: of a weight always, of an activation where it was cast.
            if entry.phase == BACKWARD_WEIGHT or (
                entry.phase != FORWARD and (entry.site.module, prod(ref.shape)) in self.cast_inputs
            ):
                made = replace(made, id=self.next_id)
                self.next_id += 1
                after.append(
                    StepOp(copy_op(made, ref), entry.phase, entry.site, "aten._to_copy", (made,), (ref,))
                )
            else:
                self.dtypes[ref.id] = self.half
            outputs.append(made)
        product = replace(entry, op=op, inputs=tuple(inputs), outputs=tuple(outputs))
        return (*before, product, *after)

    def _streaming(self, entry: StepOp, op: Streaming) -> tuple[StepOp, ...]:
        inputs = tuple(map(self._current, entry.inputs))
        if inputs == entry.inputs:
            return (entry,)
        before: list[StepOp] = []
        if self._is_fp32(entry, op):
            out = "fp32"
            # Softmax reads fp16 (not bf16) and computes in fp32 itself (ATen/native/SoftMax.cpp);
            # gradients arrive in the type they need.
            reads_half = op.role == "softmax" and self.half == "fp16"
            if not reads_half and entry.phase == FORWARD:
                widened = []
                for ref in inputs:
                    if ref.dtype == self.half:
                        copy, ref = self._copy(entry, ref, "fp32")
                        before.append(copy)
                    widened.append(ref)
                inputs = tuple(widened)
        else:
            out = self._promoted(entry, inputs)
        outputs = tuple(replace(ref, dtype=out) if ref.dtype == "fp32" else ref for ref in entry.outputs)
        self.dtypes.update((ref.id, ref.dtype) for ref in outputs)
        changed = replace(
            op,
            read_bytes=_scaled(op.read_bytes, entry.inputs, inputs),
            write_bytes=_scaled(op.write_bytes, entry.outputs, outputs),
            dtype=out if op.dtype == "fp32" else op.dtype,
        )
        return (*before, replace(entry, op=changed, inputs=inputs, outputs=outputs))

    def _is_fp32(self, entry: StepOp, op: Streaming) -> bool:
        short = entry.name.rpartition(".")[2]
        if "batch_norm" in short:
            return False
        return op.role in _FP32_ROLES or short.split("_")[0] in _FP32_NAMES

    def _promoted(self, entry: StepOp, inputs: tuple[TensorRef, ...]) -> str:
        if "batch_norm" in entry.name:
            return self.half
        wide = any(ref.dtype == "fp32" and not _is_scalar(ref) for ref in inputs)
        return "fp32" if wide else self.half


def _is_scalar(ref: TensorRef) -> bool:
    return not ref.shape


def _with_dtype(op: Op, dtype: str) -> Op:
    return replace(op, dtype=dtype)  # type: ignore[type-var]


def _scaled(moved: int, old: tuple[TensorRef, ...], new: tuple[TensorRef, ...]) -> int:
    before = tensor_bytes(old)
    return round(moved * tensor_bytes(new) / before) if before else moved


def _add_scaler(step: Step, replaced: Edits) -> None:
    """The gradient scaler divides every gradient by the scale before the optimizer runs."""
    first = next((i for i, entry in enumerate(step.ops) if entry.phase == OPTIMIZER), None)
    sizes = [prod(p.shape) * size_bytes(p.dtype) for p in step.parameters.values() if p.trainable]
    if first is None or not sizes:
        return
    elements = sum(prod(p.shape) for p in step.parameters.values() if p.trainable)
    op = Streaming("optimizer", elements, sum(sizes), sum(sizes))
    entry = step.ops[first]
    scaler = StepOp(op, OPTIMIZER, entry.site, "aten._amp_foreach_non_finite_check_and_unscale_")
    replaced[first] = (scaler, entry)
