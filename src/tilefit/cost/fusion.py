"""What compilation does to a step: chains of streaming operations become one kernel each.

A model of ``torch.compile`` (Inductor, 2.11 to 2.13), compared with what Inductor schedules by
``benchmarks/inductor_kernels.py``. Its assumptions stand where they are used: what is left to Python
(:mod:`tilefit.cost.uncompiled`), what Inductor is given (:mod:`~tilefit.cost.lowering`), what fuses
(:mod:`~tilefit.cost.chains`), what is kept (:mod:`~tilefit.cost.kept`), what the host pays
(:mod:`~tilefit.cost.launch`). Here is what becomes of a chain:

- Each of more than eight tensors that are joined is written to its place by a kernel.
- A sum across rows or over everything has two stages. The users of statistics over a batch read once more
  what its input is made of, or the input, which is then written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from tilefit.cost.chains import Chain, Chains, adds_across
from tilefit.cost.kept import memory
from tilefit.cost.lowering import ADDING, INDUCTOR, Value, flop_of, lowered, padded
from tilefit.cost.streaming import GENERATED
from tilefit.cost.uncompiled import marked, within
from tilefit.ops import Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.scaling import tensors_that_stay

#: Sums and products so far: where they run across rows, each thread goes down a column, and each element that
#: the kernel touches is an access of its own. Of the 32 bytes that the memory moves at least, the L2 cache
#: saves a part: on an H100 8.4 M elements took 0.19 ms and 16.8 M 0.37 ms each way
#: (``benchmarks/compiled_calls.py``), 4.2 M of a state space model, with others, 0.26 ms.
_SCANS = ("cumsum", "cumprod")
_APART_BYTES = 27
#: Sums for enough results or of so few elements have one stage; multiprocessors of an H100.
_SMS, _SHORT_ROW, _SHORT_COLUMN = 132, 8192, 128
#: Tensors that one kernel joins at most (``torch._inductor.config.max_pointwise_cat_inputs``).
_MOST_JOINED = 8


def fuse(step: Step, parts: Collection[str] = ()) -> Step:
    """The step as a compiled model would run it; as it is where nothing of the model is compiled.

    Args:
        step: As PyTorch runs it by itself.
        parts: Modules that are compiled each for itself, in a model that is not; none for the whole model.
    """
    inside = within(parts)
    apart = [replace(entry, eager=bool(parts) and not inside(entry)) for entry in step.ops]
    entries = marked([*lowered(replace(step, ops=tuple(apart)))], step.program)
    if not entries:
        return replace(step, settings=replace(step.settings, compiled=False))
    chains = Chains(entries, step.returned)
    ops = tuple(_kernels(chains))
    return replace(
        step,
        ops=ops,
        program=step.program.moved(_places(step.ops, ops)),
        memory=memory(chains, step, tensors_that_stay(step.ops, step.parameters)),
        settings=replace(step.settings, compiled=not parts),
    )


def _places(ops: Sequence[StepOp], kernels: Sequence[StepOp]) -> Callable[[int], int]:
    """Where something is among kernels that was so far among operations: behind as large a share of its part
    of the step (which kernel an operation went into is not told)."""
    before, after = ([entry.phase.partition("-")[0] for entry in each] for each in (ops, kernels))
    places = {part: [index for index, each in enumerate(after, 1) if each == part] for part in set(before)}

    def place(index: int) -> int:
        index = min(index, len(before))
        part = before[index - 1] if index else ""
        made = places.get(part)
        return made[-(-before[:index].count(part) * len(made) // before.count(part)) - 1] if made else 0

    return place


def _kernels(chains: Chains) -> Iterator[StepOp]:
    """The step's operations, each chain as one."""
    copies: set[tuple[Value, int]] = set()
    for index, entry in enumerate(chains.ops):
        chain = chains.of.get(index)
        if chain is None:
            if rest := 0 if entry.eager else chains.rest.get(index, 0):  # of what libraries write to in part
                size, dtype = rest + entry.outputs[0].bytes, entry.outputs[0].dtype
                whole = Streaming("copy", size // size_bytes(dtype), size, size, dtype, function="clone")
                yield replace(entry, op=whole, name="aten.clone", inputs=(), outputs=())
            yield from padded(entry, chains.sources[index], copies)
        elif index == chain.position and chain.members:
            yield _kernel(chains, chain)


def _scans_across(entry: StepOp, op: Streaming) -> bool:
    """It adds up along another dimension than the contiguous one."""
    return op.function in _SCANS and bool(entry.inputs) and entry.inputs[0].shape[-1:] != (op.inner,)


def _stages(chains: Chains, entry: StepOp, op: Streaming) -> int:
    """Kernels of an operation beside the one that it is part of: statistics, and sums in several stages."""
    rest = op.elements // max(1, op.inner)  # as many as are normalised apart
    if op.function.startswith("native_batch_norm"):
        # Channels are rows, but for vectors and in NHWC. Two sums, or a variance, take two kernels more.
        rows = len(entry.inputs[0].shape) not in (2, 4 * chains.last)
        return 1 + 2 * _is_split(op.inner, rest, rows)
    if op.function == "native_layer_norm_backward" and len(entry.outputs) > 1:  # of scale and shift, likewise
        return 1 + (len(entry.outputs) - 1) * _is_split(rest, op.inner, rows=False)
    if op.role not in ("reduction", "loss") or not entry.outputs:
        return int(INDUCTOR.stages.get(op.function, 0))
    made = entry.outputs[0].elements
    added = rest if op.role == "loss" and op.inner else op.elements // max(1, made)
    return _is_split(added, made, rows=made == 1 or not adds_across(op))


def _is_split(added: int, made: int, rows: bool) -> bool:
    """A sum of so many elements for each of so many results has two stages (Inductor's
    ``reduction_split_factor``).

    Args:
        rows: What is added to a result lies together.
    """
    most, least = (2 * _SMS, _SHORT_ROW) if rows else (64 * _SMS, _SHORT_COLUMN)
    return made < most and added > least


def _apart(sizes: Collection[int], refs: Iterable[TensorRef]) -> int:
    """Bytes beside their own that are moved for tensors of so many elements, each of which is an access."""
    return sum(ref.elements * (_APART_BYTES - size_bytes(ref.dtype)) for ref in refs if ref.elements in sizes)


def _second_pass(chains: Chains, chain: Chain, index: int) -> int:
    """Bytes moved before a norm can go on from its statistics: what its inputs are made of is read and
    computed once more, or the inputs are read, which then are written."""
    before: set[int] = set()
    open_ = [index]
    while open_:
        made = {writer for _, writer in chains.sources[open_.pop()] if chains.of.get(writer) is chain}
        open_ += made - before
        before |= made
    direct = sum(
        ref.bytes * (1 + (writer in before and (writer, ref.id) not in chains.written))
        for ref, writer in chains.sources[index]
    )
    readers = {index, *before}
    roots = sum(max((each[i] for i in readers & {*each}), default=0) for each in chain.reads.values())
    return min(roots, direct)


def _kernel(chains: Chains, chain: Chain) -> StepOp:
    """The one kernel that a chain becomes."""
    outputs: dict[int, TensorRef] = {}
    # What is left of tensors that are written to in part is copied.
    write_bytes = sum(chains.rest.get(index, 0) for index in chain.members)
    read_bytes = write_bytes + sum(max(readers.values()) for readers in chain.reads.values())
    flop = sum(flop_of(chains.streaming(index)) for index in chain.again)
    members = [(chains.ops[index], chains.streaming(index)) for index in chain.members]
    for index, (entry, op) in zip(chain.members, members, strict=True):
        flop += flop_of(op)
        read_bytes += 0 if entry.inputs else op.read_bytes
        write_bytes += 0 if entry.outputs else op.write_bytes
        for ref in entry.outputs:
            if (index, ref.id) in chains.written:
                outputs[ref.id] = ref
                write_bytes += min(ref.bytes, op.write_bytes)
        if (index, -1 - index) in chains.written:
            outputs[-1 - index] = chains.refs[index, -1 - index]
            write_bytes += op.elements * size_bytes("fp32")
        # Statistics that need the whole grid, or too much of it, before they can be used.
        if op.function.removesuffix("_backward") in ("native_batch_norm", "native_group_norm"):
            read_bytes += _second_pass(chains, chain, index)
    scanned = {op.elements for entry, op in members if _scans_across(entry, op)}
    read_bytes += _apart(scanned, (chains.refs[value] for value in chain.reads))
    write_bytes += _apart(scanned, outputs.values())
    parts = [op for _, op in members]
    # Each part of what many are joined to is written by a kernel, each table added to by another.
    joined = [len(entry.inputs) for entry, op in members if op.function in ("cat", "stack")]
    apart = sum(count - 1 for count in joined if count > _MOST_JOINED)
    apart += max(0, sum(op.function in ADDING for op in parts) - 1)
    largest = max(parts, key=lambda part: part.elements)
    first = members[0][0]
    names = dict.fromkeys(entry.name.removeprefix("aten.") for entry, _ in members)
    # It is part of the call that all of its largest work belongs to; copies go with what they are for.
    calls = {
        entry.site.fallback
        for entry, part in members
        if (part.elements == largest.elements and part.role != "copy")
        or part.function == "embedding_dense_backward"  # which takes longer than all else in it
    } or {first.site.fallback}
    return StepOp(
        Streaming(
            role="pointwise",
            elements=largest.elements,
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            dtype=largest.dtype,
            flop_per_element=flop / largest.elements if largest.elements else 0.0,
            strided=any(part.strided for part in parts if part.role in ("copy", "pointwise")),
            function=GENERATED,
            kernels=1 + sum(_stages(chains, *member) for member in members) + apart,
        ),
        phase=first.phase,
        site=replace(first.site, fallback=calls.pop() if len(calls) == 1 else None),
        name=first.name if len(parts) == 1 else f"fused({', '.join(name for name in names if name)})",
        inputs=tuple(chains.refs[value] for value in chain.reads),
        outputs=tuple(outputs.values()),
        recomputed=first.recomputed,
    )
