"""What the ranks of a program exchange, as its rules see and change it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from tilefit.ops import FORWARD, OPTIMIZER, Exchange, Program, Step
from tilefit.ops.collective import ALL_REDUCE
from tilefit.ops.dtypes import FLOATS
from tilefit.ops.program import AWAIT, EXCHANGE, RECORD, Ordered
from tilefit.rules.base import Change, changed

#: Bytes of a message beyond which a longer one gains little: ``DistributedDataParallel``'s own choice.
BUCKET_BYTES = 25 << 20
#: All-reduces of less are of a loss or a norm. A choice.
_LEAST_BYTES = 1 << 10


def gradient_sums(step: Step) -> list[int]:
    """The all-reduces of gradients, as indices of the program's exchanges: those whose size is not the
    batch's."""
    return [
        index
        for index, each in enumerate(step.program.exchanges)
        if each.function == ALL_REDUCE and not each.grows and each.dtype in FLOATS
        if each.name == ALL_REDUCE and each.bytes >= _LEAST_BYTES
    ]


def chunks(exchanges: Sequence[Exchange], found: Iterable[int]) -> list[list[int]]:
    """Neighbours that would fill a bucket together; of one group and one element type."""
    made: list[list[int]] = []
    open_: dict[tuple[str, str], list[int]] = {}
    for index in found:
        each = exchanges[index]
        own = open_.setdefault((each.group, each.dtype), [])
        own.append(index)
        if sum(exchanges[i].bytes for i in own) >= BUCKET_BYTES:
            made.append(open_.pop((each.group, each.dtype)))
    return made + list(open_.values())


def merged(program: Program, parts: Iterable[Sequence[int]]) -> Program:
    """Each part in one message, where its last one was."""
    sizes = {part[-1]: sum(program.exchanges[i].bytes for i in part) for part in parts}
    gone = {index for part in parts for index in part[:-1]}
    exchanges = tuple(
        replace(each, bytes=sizes.get(index, each.bytes)) for index, each in enumerate(program.exchanges)
    )
    return without(replace(program, exchanges=exchanges), gone)


def without(program: Program, gone: Collection[int]) -> Program:
    """The program without some exchanges; what waited for them waits for what was before."""
    kept = [index for index in range(len(program.exchanges)) if index not in gone]
    number = {index: new for new, index in enumerate(kept)}
    return replace(
        program,
        exchanges=tuple(program.exchanges[index] for index in kept),
        order=tuple(
            replace(each, number=number[each.number]) if each.kind == EXCHANGE else each
            for each in program.order
            if each.kind != EXCHANGE or each.number not in gone
        ),
    )


def beside(program: Program, added: Iterable[tuple[int, int, Exchange]]) -> Program:
    """With further exchanges on a stream of their own: where each is asked for, and where it is awaited."""
    exchanges, order = list(program.exchanges), list(program.order)
    stream = 1 + max((each.stream for each in order), default=0)
    event = 1 + max((each.number for each in order), default=0)
    for issued, awaited, exchange in added:
        order += [
            Ordered(issued, RECORD, 0, event),
            Ordered(issued, AWAIT, stream, event),
            Ordered(issued, EXCHANGE, stream, len(exchanges)),
            Ordered(issued, RECORD, stream, event + 1),
            Ordered(awaited, AWAIT, 0, event + 1),
        ]
        exchanges.append(replace(exchange, index=issued))
        event += 2
    order.sort(key=lambda each: each.index)
    return replace(program, exchanges=tuple(exchanges), order=tuple(order))


def without_ops(step: Step, gone: Collection[int], program: Program) -> Step:
    """The step without some operations, in another program."""
    return changed(replace(step, program=program), Change(dict.fromkeys(gone, ())))


def last_backward(step: Step) -> tuple[int, int]:
    """The operations of the last backward pass: the first one's index, and that behind the last; 0 without
    one."""
    places = [i for i, entry in enumerate(step.ops) if entry.phase not in (FORWARD, OPTIMIZER)]
    if not places:
        return 0, 0
    forward = [i for i in range(places[-1]) if step.ops[i].phase == FORWARD and not step.ops[i].recomputed]
    return max(forward, default=-1) + 1, places[-1] + 1
