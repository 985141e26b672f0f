"""What-if: several operations as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tilefit.ops import Step, StepOp, Streaming
from tilefit.rules.base import Edits
from tilefit.rules.flow import distinct
from tilefit.rules.layers import gemm


def instead(indices: Sequence[int], *entries: StepOp, at: int | None = None) -> Edits:
    """Entries in the place of operations: where the first of these was, or ``at`` another."""
    return {**dict.fromkeys(indices, ()), indices[0] if at is None else at: entries}


def one_product(step: Step, indices: Sequence[int], size: str, at: int) -> Edits:
    """Products that are alike but for a size (``m``, ``n`` or ``k``) as one, in which the sizes add up."""
    products = [gemm(step, index) for index in indices]
    entries = [step.ops[index] for index in indices]
    total: dict[str, Any] = {size: sum(getattr(product, size) for product in products)}
    bias = any(product.bias for product in products)
    merged = replace(
        entries[0],
        op=replace(products[0], bias=bias, ld_a=0, ld_b=0, **total),
        inputs=distinct(ref for entry in entries for ref in entry.inputs),
        outputs=distinct(ref for entry in entries for ref in entry.outputs),
    )
    return instead(indices, merged, at=at)


def one_stream(step: Step, indices: Iterable[int], at: int = -1) -> Edits:
    """Streaming operations as one, those on matrices and those on vectors apart: in the place of the last one
    of its kind, or of that ``at`` a number."""
    kinds: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index in dict.fromkeys(indices):
        entry = step.ops[index]
        kinds[entry.name, len(entry.inputs[0].shape)].append(index)
    replaced: Edits = {}
    for same in kinds.values():
        replaced |= instead(same, together([step.ops[index] for index in same]), at=same[at])
    return replaced


def together(entries: Sequence[StepOp]) -> StepOp:
    """Streaming operations of one kind as one: their bytes, one kernel's fixed cost."""
    parts = [entry.op for entry in entries if isinstance(entry.op, Streaming)]
    op = replace(
        parts[0],
        elements=sum(part.elements for part in parts),
        read_bytes=sum(part.read_bytes for part in parts),
        write_bytes=sum(part.write_bytes for part in parts),
    )
    return replace(entries[0], op=op)
