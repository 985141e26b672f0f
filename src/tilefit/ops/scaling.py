"""The same step on another batch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from math import prod

from tilefit.errors import UsageError
from tilefit.ops.attention import Attention
from tilefit.ops.base import BACKWARD_WEIGHT, FORWARD, OPTIMIZER, Op
from tilefit.ops.collective import Collective
from tilefit.ops.conv import Conv
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.gemm import Gemm
from tilefit.ops.recurrent import Recurrent
from tilefit.ops.step import Parameter, Step, StepOp, TensorRef
from tilefit.ops.streaming import Streaming


def scale_batch(step: Step, factor: float) -> Step:
    """The step with ``factor`` times the samples.

    Products scale in the dimension that counts rows (the contraction in a weight gradient), convolutions,
    attention and recurrent layers in their batch, streaming operations in the share of their bytes that
    is neither a parameter nor the gradient or optimizer state of one. Activation memory scales, the rest
    stays. A tensor that scales does so in the first dimension that stays whole.

    Raises:
        UsageError: the factor is not positive.
    """
    if factor <= 0:
        raise UsageError(f"a batch cannot be scaled by {factor}")
    shapes = _shapes(step.parameters)
    fixed: set[int] = set()
    known: dict[tuple[object, ...], Op] = {}
    # A step has many operations and few different shapes.
    larger = cache(lambda shape: _larger(shape, factor))

    def scaled_ref(ref: TensorRef) -> TensorRef:
        return ref if _stays(ref, fixed) else TensorRef(ref.id, larger(ref.shape), ref.dtype, ref.parameter)

    ops = []
    for entry in step.ops:
        reads = _shares(entry.inputs, fixed)
        fixed.update(ref.id for ref in entry.outputs if _is_fixed(entry, ref, shapes, fixed))
        writes = _shares(entry.outputs, fixed)
        grows = _grows(entry, fixed)
        role = f"{entry.phase} {_rows(entry)}" if isinstance(entry.op, Gemm) else entry.phase
        key = (entry.op, role, *reads, *writes, grows)
        scaled = known.get(key)
        if scaled is None:
            scaled = known[key] = _scaled(entry, factor, reads, writes, grows)
        inputs, outputs = (tuple(map(scaled_ref, refs)) for refs in (entry.inputs, entry.outputs))
        ops.append(StepOp(scaled, entry.phase, entry.site, entry.name, inputs, outputs, entry.recomputed))
    return replace(
        step,
        ops=tuple(ops),
        batch=_times(step.batch, factor) if step.batch else 0,
        inputs=tuple(_scaled_input(text, step.batch, factor) for text in step.inputs),
        memory=step.memory.on_batch(factor),
    )


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
    return re.sub(rf"\[{batch}\b", f"[{_times(batch, factor)}", text) if batch else text


def _is_fixed(entry: StepOp, ref: TensorRef, shapes: set[tuple[int, ...]], fixed: set[int]) -> bool:
    """Whether a result has the size of a parameter whatever the batch: the gradient of one, its state."""
    if entry.phase == OPTIMIZER:
        return True
    if entry.phase == BACKWARD_WEIGHT and not isinstance(entry.op, Streaming):
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
        size = prod(ref.shape) * size_bytes(ref.dtype)
        if _stays(ref, fixed):
            stay += size
        else:
            grow += size
    return stay, grow


def _rows(entry: StepOp) -> str:
    """The dimension of a product that counts samples."""
    op = entry.op
    assert isinstance(op, Gemm)
    if entry.phase == BACKWARD_WEIGHT:
        return "k"
    for ref in entry.inputs:
        if ref.parameter and len(ref.shape) >= 2:
            sizes = {*ref.shape[-2:]}
            if sizes == {op.k, op.n}:
                return "m"
            if sizes == {op.m, op.k}:
                return "n"
    return "batch"


def _grows(entry: StepOp, fixed: set[int]) -> bool:
    """Whether the largest operand of an operation scales."""
    largest = max((*entry.inputs, *entry.outputs), key=lambda ref: prod(ref.shape), default=None)
    return largest is None or not _stays(largest, fixed)


def _scaled(entry: StepOp, factor: float, reads: tuple[int, int], writes: tuple[int, int], grows: bool) -> Op:
    op = entry.op
    if isinstance(op, Gemm):
        rows = _rows(entry)
        return replace(
            op,
            m=_times(op.m, factor if rows == "m" else 1),
            n=_times(op.n, factor if rows == "n" else 1),
            k=_times(op.k, factor if rows == "k" else 1),
            batch=_times(op.batch, factor if rows == "batch" else 1),
        )
    if isinstance(op, Attention):
        per_sample = op.mask_bytes >= op.batch * op.seq_len * op.kv_len > 0 and op.batch > 1
        mask = round(op.mask_bytes * factor) if per_sample else op.mask_bytes
        return replace(op, batch=_times(op.batch, factor), mask_bytes=mask)
    if isinstance(op, Conv | Recurrent):
        return replace(op, batch=_times(op.batch, factor))
    if entry.phase == OPTIMIZER:
        return op
    if isinstance(op, Collective):
        return replace(op, elements=_times(op.elements, factor))
    assert isinstance(op, Streaming)
    read = _growth(op.read_bytes, reads, factor)
    write = _growth(op.write_bytes, writes, factor)
    # What is normalised or reduced over the batch is more for each result, of which there are no more.
    over_batch = "batch_norm" in op.function or (op.role == "reduction" and write == 1.0)
    return replace(
        op,
        elements=_times(op.elements, factor if grows else 1),
        inner=_times(op.inner, factor) if grows and over_batch and op.inner else op.inner,
        read_bytes=round(op.read_bytes * read),
        write_bytes=round(op.write_bytes * write),
    )


def _growth(moved: int, shares: tuple[int, int], factor: float) -> float:
    stay, grow = shares
    # An operation that moves less than its operands hold picks rows (an embedding): it scales as a whole.
    if stay + grow == 0 or moved < 0.99 * (stay + grow):
        return factor if moved else 1.0
    return (stay + grow * factor) / (stay + grow)
