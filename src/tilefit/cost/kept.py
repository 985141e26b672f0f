"""What a compiled step keeps in memory: results that are written, until they are read for the last time.

Between the two graphs lies what AOTAutograd saves: the result of a softmax is computed again from its input
where that is smaller, that of a batch norm by whatever generated kernel reads it; joined tensors and
interpolations are not. Group norms would be, too, but the one model of them that was measured takes the
memory of results that are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from tilefit import gpus
from tilefit.cost.chains import Chain, Chains
from tilefit.cost.conv_kernels import workspace_bytes
from tilefit.cost.lowering import Value, padding
from tilefit.ops import FORWARD, OPTIMIZER, Conv, Memory, Step
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.peaks import fullest
from tilefit.ops.timeline import Timeline

#: Made again in the backward pass where what they are made of is smaller: by any kernel, by generated ones.
_MADE_AGAIN = ("softmax", "safe_softmax")
_MADE_AGAIN_IN_KERNELS = (*_MADE_AGAIN, "native_batch_norm")
#: The copies that convolutions make are the same on any GPU with Tensor Cores.
_ANY_GPU = "h200"


def memory(chains: Chains, step: Step, stay: Collection[int]) -> Memory:
    """What the step needs where only what is written takes memory, until it is read for the last time:
    results, and the copies that pad products; and, while they run, those that convolutions make.

    Args:
        chains: What is fused.
        step: As it runs without the compiler.
        stay: Numbers of the tensors that have their size whatever the batch.
    """
    made, last = _lives(chains)
    freed: dict[int, list[Value]] = {}
    for value in (value for values in made.values() for value in values):
        freed.setdefault(last.get(value, len(chains.ops)), []).append(value)
    live: dict[int, tuple[Value, int]] = {}  # by number: what is written in place takes no more
    held = step.memory.fixed_bytes - step.memory.gradient_bytes
    now = {True: held, False: 0}  # does it stay whatever the batch?
    moments = []
    saved = 0
    for index, entry in enumerate(chains.ops):
        for value, size in made.get(index, {}).items():
            _, before = live.get(value[1], (value, 0))
            now[value[1] in stay] += size - before
            live[value[1]] = value, size
        copied = workspace_bytes(entry.op, gpus.get(_ANY_GPU)) if isinstance(entry.op, Conv) else 0
        moments.append((now[True], now[False] + copied))
        for value in freed.get(index, ()):
            if live.get(value[1], (None, 0))[0] == value:
                now[value[1] in stay] -= live.pop(value[1])[1]
        if entry.phase == FORWARD:
            saved = sum(now.values()) - held
    moments += [(alive, 0) for alive in _while_updating(step)]
    peak_bytes = max((stays + grows for stays, grows in moments), default=held)
    return replace(
        step.memory,
        saved_bytes=saved,
        peak_bytes=peak_bytes,
        moments=fullest(moments),
        timeline=Timeline(),  # that of the operations one by one
    )


def _lives(chains: Chains) -> tuple[dict[int, dict[Value, int]], dict[Value, int]]:
    """The results and the copies that pad products, with their bytes, by the operation that makes them;
    and the last that reads each."""
    made: dict[int, dict[Value, int]] = {}
    last: dict[Value, int] = {}
    pads: dict[tuple[Value | int, int, bool], Value] = {}
    again: set[Value] = set()
    for index, entry in enumerate(chains.ops):
        chain = chains.of.get(index)
        position = chain.position if chain else index
        reads = chain.reads if chain else [(writer, ref.id) for ref, writer in chains.sources[index]]
        for value in reads:
            saved = (value,) if entry.phase == FORWARD else _saved(chains, value, chain)
            last.update(dict.fromkeys(saved, position))
            again.update({value} - {*saved})
        if entry.phase == OPTIMIZER:
            continue
        for value in [(index, ref.id) for ref in entry.outputs] + [(index, -1 - index)]:
            if value in chains.refs and (chain is None or value in chains.written):
                made.setdefault(position, {})[value] = chains.refs[value].bytes
        for pad in padding(entry, chains.sources[index])[1]:
            # Each of the two graphs makes its own, where it can in the kernel that makes the operand.
            graph = entry.phase == FORWARD
            key = pad.operand or index, pad.after, graph
            if key not in pads:
                pads[key] = index, -1 - len(chains.ops) - len(pads)
                source = chains.of.get(pad.operand[0]) if pad.operand else None
                place = source.position if source and source.graph[0] == graph else index
                made.setdefault(place, {})[pads[key]] = pad.after * size_bytes(pad.dtype)
            last[pads[key]] = index
    for value in again - last.keys():  # only for who computes it again: it stays in its kernel
        made[chains.of[value[0]].position].pop(value, None)
    return made, last


def _saved(chains: Chains, value: Value, reader: Chain | None) -> Collection[Value]:
    """What is kept so that a chain of the backward pass, or a library's kernel, can have a value."""
    writer = value[0]
    made = writer in chains.of and value[1] >= 0 and chains.ops[writer].phase == FORWARD
    again = _MADE_AGAIN if reader is None else _MADE_AGAIN_IN_KERNELS
    if not made or chains.streaming(writer).function.strip("_") not in again:
        return (value,)
    ref, source = chains.sources[writer][0]
    roots = chains.roots((source, ref.id), ref.bytes)
    return roots if sum(roots.values()) <= chains.refs[value].bytes else (value,)


def _while_updating(step: Step) -> Iterator[int]:
    """Bytes that are alive while the optimizer runs, which is not compiled."""
    first = next((i for i, entry in enumerate(step.ops) if entry.phase == OPTIMIZER), len(step.ops))
    alive = 0
    for _, index, size in step.memory.timeline.changes():
        alive += size
        if first <= index < len(step.ops):
            yield alive
