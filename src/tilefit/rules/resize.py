"""What-if: a step with feature sizes (or channel counts) changed wherever they occur."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from tilefit.ops import Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.base import Edits
from tilefit.rules.layers import Linear, products

#: Which dimension of an activation holds a size: its last (features), its second (channels), any.
LAST, CHANNEL, ANY = "last", "channel", "any"


def pad(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def resized(entry: StepOp, sizes: Mapping[int, int], *names: str, **others: int) -> StepOp:
    """An operation with the sizes in some of its fields exchanged as ``sizes`` says (old: new)."""
    now = {name: getattr(entry.op, name) for name in names}
    changed: dict[str, Any] = {name: sizes.get(size, size) for name, size in now.items()} | others
    return replace(entry, op=replace(entry.op, **changed))  # type: ignore[type-var]


def resize_features(step: Step, layers: Iterable[Linear], sizes: Mapping[int, int]) -> Edits:
    """The products of the given layers with their feature sizes exchanged as ``sizes`` says (old: new)."""
    replaced: Edits = {}
    for layer in layers:
        in_features = sizes.get(layer.in_features, layer.in_features)
        out_features = sizes.get(layer.out_features, layer.out_features)
        for index, op in products(step, layer):
            entry = step.ops[index]
            resized = layer.resized(op, entry.phase, in_features, out_features)
            replaced[index] = (replace(entry, op=resized),)
    return replaced


def resize_streams(step: Step, sizes: Mapping[int, int], where: str = LAST) -> Edits:
    """The streaming operations on tensors with such dimensions, with the bytes that the new ones need.

    Any dimension of a parameter counts; of an activation, the one that ``where`` names.
    """
    replaced: Edits = {}
    for index, entry, op in step.each(Streaming):
        read = _growth(entry.inputs, sizes, where)
        written = _growth(entry.outputs, sizes, where)
        if read == 1.0 == written:
            continue
        grown = replace(
            op,
            elements=round(op.elements * max(read, written)),
            read_bytes=round(op.read_bytes * read),
            write_bytes=round(op.write_bytes * written),
            inner=sizes.get(op.inner, op.inner),
        )
        replaced[index] = (replace(entry, op=grown),)
    return replaced


def _growth(tensors: tuple[TensorRef, ...], sizes: Mapping[int, int], where: str) -> float:
    before = after = 0
    for ref in tensors:
        before += ref.bytes
        after += prod(_resized(ref, sizes, where)) * size_bytes(ref.dtype)
    return after / before if before else 1.0


def _resized(ref: TensorRef, sizes: Mapping[int, int], where: str) -> tuple[int, ...]:
    shape = ref.shape
    if ref.parameter or where == ANY:
        return tuple(sizes.get(size, size) for size in shape)
    if where == LAST:
        return (*shape[:-1], sizes.get(shape[-1], shape[-1])) if shape else shape
    if len(shape) < 3:
        return shape
    return (shape[0], sizes.get(shape[1], shape[1]), *shape[2:])
