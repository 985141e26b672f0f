"""The same step on another batch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from tilefit.errors import UsageError
from tilefit.ops.base import BACKWARD_WEIGHT, FORWARD, OPTIMIZER, Growth, Op
from tilefit.ops.entries import Parameter, StepOp, TensorRef
from tilefit.ops.step import Same, Step


def scale_batch(step: Step, factor: float) -> Step:
    """The step with ``factor`` times the samples.

    Each kind of operation says how it scales (:meth:`tilefit.ops.Op.on_batch`). Activation memory scales, the
    rest stays. A tensor that scales does so in the first dimension that stays whole.

    Raises:
        UsageError: the factor is not positive.
    """
    if factor <= 0:
        raise UsageError(f"a batch cannot be scaled by {factor}")
    parts, places = _growing(Same(step))
    scaled = [op.on_batch(Growth(factor, *part)) for op, part in parts]
    # A step has many operations and few different shapes.
    larger = cache(lambda shape: _larger(shape, factor))
    made: dict[int, TensorRef] = {}

    def on_batch(ref: TensorRef, stays: bool) -> TensorRef:
        if stays:
            return ref
        if (found := made.get(id(ref))) is None:
            found = TensorRef(ref.id, larger(ref.shape), ref.dtype, ref.parameter, ref.offset)
            made[id(ref)] = found
        return found

    ops = [
        entry.having(
            scaled[part], tuple(map(on_batch, entry.inputs, stay)), tuple(map(on_batch, entry.outputs, left))
        )
        for entry, (part, stay, left) in zip(step.ops, places, strict=True)
    ]
    return replace(
        step,
        ops=tuple(ops),
        batch=_times(step.batch, factor) if step.batch else 0,
        inputs=tuple(_scaled_input(text, step.batch, factor) for text in step.inputs),
        memory=step.memory.on_batch(factor),
        program=step.program.on_batch(factor),
    )


@lru_cache(maxsize=2)
def _growing(
    same: Same,
) -> tuple[list[tuple[Op, Any]], list[tuple[int, tuple[bool, ...], tuple[bool, ...]]]]:
    """What scales in a step, whatever the factor: different operations with all but the factor of their
    :class:`Growth`; and of each of the step's which of these it is, and which operands and results stay."""
    step = same.step
    shapes = _shapes(step.parameters)
    fixed: set[int] = set()
    parts: dict[tuple[Op, Any], int] = {}
    places = []
    for entry in step.ops:
        reads = _shares(entry.inputs, fixed)
        fixed.update(ref.id for ref in entry.outputs if _is_fixed(entry, ref, shapes, fixed))
        writes = _shares(entry.outputs, fixed)
        weights = tuple(ref.shape[-2:] for ref in entry.inputs if ref.parameter and len(ref.shape) >= 2)
        part = entry.op, (entry.phase, weights, reads, writes, _grows(entry, fixed))
        stay, left = (tuple(_stays(ref, fixed) for ref in refs) for refs in (entry.inputs, entry.outputs))
        places.append((parts.setdefault(part, len(parts)), stay, left))
    return [*parts], places


def tensors_that_stay(ops: Iterable[StepOp], parameters: Mapping[str, Parameter]) -> set[int]:
    """Numbers of the tensors that have their size whatever the batch: what is made of parameters alone, their
    gradients, the optimizer's."""
    shapes = _shapes(parameters)
    fixed: set[int] = set()
    for entry in ops:
        fixed.update(ref.id for ref in entry.outputs if _is_fixed(entry, ref, shapes, fixed))
    return fixed


def _shapes(parameters: Mapping[str, Parameter]) -> set[tuple[int, ...]]:
    return {parameter.shape for parameter in parameters.values()}


def _times(size: int, factor: float) -> int:
    return max(1, round(size * factor))


def _larger(shape: tuple[int, ...], factor: float) -> tuple[int, ...]:
    axis = next((i for i, size in enumerate(shape) if not size * factor % 1), 0)
    return (*shape[:axis], _times(shape[axis], factor), *shape[axis + 1 :])


def _scaled_input(text: str, batch: int, factor: float) -> str:
    return re.sub(rf"(?<=[\[,]){batch}\b", str(_times(batch, factor)), text, count=1) if batch else text


def _is_fixed(entry: StepOp, ref: TensorRef, shapes: set[tuple[int, ...]], fixed: set[int]) -> bool:
    """Whether a result has the size of a parameter whatever the batch: the gradient of one, its state."""
    if entry.phase == OPTIMIZER:
        return True
    if entry.phase == BACKWARD_WEIGHT and entry.op.multiplies:
        return True
    if entry.phase != FORWARD and ref.shape in shapes:
        return True
    return bool(entry.inputs) and all(_stays(source, fixed) for source in entry.inputs)


def _stays(ref: TensorRef, fixed: set[int]) -> bool:
    return bool(ref.parameter) or ref.id in fixed or not ref.shape


def _shares(tensors: tuple[TensorRef, ...], fixed: set[int]) -> tuple[int, int]:
    """Bytes that stay, bytes that scale."""
    stay = grow = 0
    for ref in tensors:
        if _stays(ref, fixed):
            stay += ref.bytes
        else:
            grow += ref.bytes
    return stay, grow


def _grows(entry: StepOp, fixed: set[int]) -> bool:
    """Whether the largest operand of an operation scales."""
    largest = max((*entry.inputs, *entry.outputs), key=lambda ref: ref.elements, default=None)
    return largest is None or not _stays(largest, fixed)
