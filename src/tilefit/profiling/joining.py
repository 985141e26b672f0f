"""Which operation of a captured step each operation of a profiled one is.

Both run the same code in the same order, so operations that agree in what can be compared are paired in
order; what agrees in most goes first. A compiler reorders and fuses, which leaves shapes and modules.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

from tilefit.ops import StepOp
from tilefit.profiling.operations import Unit, matching_name

#: Part of the step, function, module, the operation itself, its kind.
_Facts = tuple[str, str, str, Hashable, str]
_Key = Callable[[str, str, str, Hashable, str], Hashable]

_KEYS: tuple[_Key, ...] = (
    lambda part, function, module, op, kind: (part, function, module, op),
    lambda part, function, module, op, kind: (part, function, module),
    lambda part, function, module, op, kind: (part, module, op),
    # Without the module: what was compiled or replayed. Streaming operations are too much alike for that.
    lambda part, function, module, op, kind: (part, op) if kind != "streaming" else None,
    lambda part, function, module, op, kind: (part, module, kind) if kind != "streaming" else None,
    lambda part, function, module, op, kind: (part, kind) if kind in ("attention", "recurrent") else None,
)


def _of_captured(entry: StepOp) -> _Facts:
    part = "forward" if entry.recomputed else entry.phase.partition("-")[0]
    return part, matching_name(entry.name), entry.site.module, entry.op, entry.op.kind


def _of_profiled(unit: Unit) -> _Facts:
    op = unit.op if unit.known else None
    return unit.phase.partition("-")[0], unit.function, unit.call.module or "", op, unit.op.kind


def join(ops: Sequence[StepOp], units: Sequence[Unit]) -> list[int | None]:
    """For each profiled operation the index of the captured one it is; None where there is none.

    Args:
        ops: The captured step's operations, in order.
        units: The profiled step's, in order.
    """
    found: list[int | None] = [None] * len(units)
    taken = [False] * len(ops)
    captured, profiled = list(map(_of_captured, ops)), list(map(_of_profiled, units))
    for key in _KEYS:
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for index, facts in enumerate(captured):
            if not taken[index]:
                waiting[key(*facts)].append(index)
        for number, facts in enumerate(profiled):
            if found[number] is not None or key(*facts) is None:
                continue
            queue = waiting.get(key(*facts))
            if queue:
                found[number] = index = queue.popleft()
                taken[index] = True
    return found
