"""A step at any value of one size, from its captures at a few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from math import prod
from typing import Any

from tilefit.ops.base import Op
from tilefit.ops.entries import StepOp, TensorRef
from tilefit.ops.memory import Memory
from tilefit.ops.program import Program
from tilefit.ops.step import Step

#: Captures that a curve needs: the sizes of an operation, its bytes and the memory are polynomials of degree
#: two at most in the batch, the sequence length or the vocabulary (a score matrix grows with the square).
CAPTURES = 3
#: What is interpolated of the memory; which moments are the fullest changes by leaps.
_SIZES = [each.name for each in fields(Memory) if each.name.endswith("_bytes")]

#: The step at a size.
StepAt = Callable[[int], Step]
_Shape = tuple[int, ...]


def interpolate(steps: Mapping[int, Step]) -> StepAt | None:
    """The step as a function of the size that its captures differ in.

    Every number of every operation, of the shapes of its tensors and of the memory is the polynomial through
    its captured values. Fields of :attr:`~tilefit.ops.Op.stepwise`, the description of the inputs and
    everything else are those of the nearest capture.

    Args:
        steps: Captures by size, :data:`CAPTURES` of them.

    Returns:
        None where the captures run different operations, or differ in more than numbers.
    """
    sizes = sorted(steps)
    ops: dict[tuple[Op, ...], int] = {}
    shapes: dict[tuple[_Shape, ...], int] = {}
    rows: list[tuple[int, list[int]]] = []
    if len({len(step.ops) for step in steps.values()}) > 1:
        return None
    for row in zip(*(steps[size].ops for size in sizes), strict=True):
        refs = [(*entry.inputs, *entry.outputs) for entry in row]
        if len({(entry.phase, len(entry.inputs), len(entry.outputs)) for entry in row}) > 1:
            return None
        of_refs = [
            shapes.setdefault(tuple(ref.shape for ref in same), len(shapes))
            for same in zip(*refs, strict=True)
        ]
        rows.append((ops.setdefault(tuple(entry.op for entry in row), len(ops)), of_refs))
    programs = [steps[size].program for size in sizes]
    if len({*map(_events, programs)}) > 1 or any(steps[size].ranks for size in sizes):
        return None
    if not all(map(_alike, ops)) or any(len({*map(len, same)}) > 1 for same in shapes):
        return None

    def at(size: int) -> Step:
        if size in steps:
            return steps[size]
        near = min(range(len(sizes)), key=lambda index: abs(sizes[index] - size))
        weights = _weights(sizes, size)
        new_ops = [_between(same, weights, near) for same in ops]
        new_shapes = [
            same[0]
            if len({*same}) == 1
            else tuple(_value(extents, weights) for extents in zip(*same, strict=True))
            for same in shapes
        ]
        captured = steps[sizes[near]]
        memory: dict[str, Any] = {
            name: _value([getattr(steps[other].memory, name) for other in sizes], weights) for name in _SIZES
        }
        return replace(
            captured,
            ops=tuple(
                _entry(entry, new_ops[op], [new_shapes[shape] for shape in of_refs])
                for entry, (op, of_refs) in zip(captured.ops, rows, strict=True)
            ),
            batch=_value([steps[other].batch for other in sizes], weights),
            memory=Memory(**memory),
            program=_between_programs(programs, weights, near),
        )

    return at


def _events(program: Program) -> Any:
    """What has to be alike in programs, so that only its bytes differ."""
    met = tuple((each.index, each.kind, each.blocks) for each in program.events)
    asked = tuple((each.index, each.function, each.ranks) for each in program.exchanges)
    return met, asked, program.order, tuple(name for name, _ in program.host_work)


def _between_programs(programs: Sequence[Program], weights: Sequence[Fraction], near: int) -> Program:
    """The nearest program, with the bytes of its copies and exchanges and the host's work between theirs."""

    def between(name: str) -> tuple[Any, ...]:
        rows = zip(*(getattr(each, name) for each in programs), strict=True)
        return tuple(replace(row[near], bytes=_value([each.bytes for each in row], weights)) for row in rows)

    work = tuple(
        (row[near][0], _value([elements for _, elements in row], weights))
        for row in zip(*(each.host_work for each in programs), strict=True)
    )
    events, exchanges = between("events"), between("exchanges")
    return replace(programs[near], events=events, exchanges=exchanges, host_work=work)


def _entry(entry: StepOp, op: Op, shapes: Sequence[_Shape]) -> StepOp:
    """The operation with other numbers and other shapes of its inputs and outputs."""
    refs = [
        ref if ref.shape == shape else TensorRef(ref.id, shape, ref.dtype, ref.parameter, ref.offset)
        for ref, shape in zip((*entry.inputs, *entry.outputs), shapes, strict=True)
    ]
    count = len(entry.inputs)
    return entry.having(op, tuple(refs[:count]), tuple(refs[count:]))


def _alike(ops: tuple[Op, ...]) -> bool:
    """Whether operations differ in numbers alone."""
    return len({type(op) for op in ops}) == 1 and all(
        _is_number(values[0]) or len({*values}) == 1
        for values in zip(*(op.values for op in ops), strict=True)
    )


def _between(ops: tuple[Op, ...], weights: Sequence[Fraction], near: int) -> Op:
    changed = {}
    names = [each.name for each in fields(ops[0])]  # type: ignore[arg-type]
    for name, *values in zip(names, *(op.values for op in ops), strict=True):
        if len({*values}) > 1 and name not in ops[0].stepwise:
            changed[name] = _value(values, weights)
    return replace(ops[near], **changed) if changed else ops[near]  # type: ignore[type-var]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(values: Sequence[int], weights: Sequence[Fraction]) -> int:
    """The polynomial's value: at least 1 where all of them are, never below 0."""
    exact = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return max(round(exact), 1 if min(values) > 0 else 0)


def _weights(sizes: Sequence[int], size: int) -> list[Fraction]:
    """Lagrange's: the polynomial through values at some sizes is their weighted sum at any size."""
    return [
        prod((Fraction(size - other, here - other) for other in sizes if other != here), start=Fraction(1))
        for here in sizes
    ]
