"""What compilation does to a step: chains of streaming operations become one kernel each.

A model of ``torch.compile`` (Inductor), with these assumptions:

- Pointwise operations, copies and casts, reductions, normalizations and softmax fuse with the producers of
  their inputs. Products, convolutions, attention, embeddings, sorts and the optimizer stay as they are.
- The forward and the backward graph are compiled apart; nothing fuses across them.
- A result used only inside its chain is never written. One that is needed outside, or by the backward
  pass, is written once. An input is read once however many operations of the chain read it. Inductor also
  recomputes cheap results instead of saving them; that is not modelled, so the gain is understated.
- A reduction over everything ends its chain: who needs its result must wait for the whole grid.
- A generated kernel moves its bytes at the rate of a pointwise one, whatever it normalises or reduces: the
  library's kernels for these are often far slower (batch normalization in NCHW above all).
- Convolutions run in NHWC (Inductor's layout optimization), but for grouped ones that are not depthwise,
  whose presence switches it off.
- A misaligned product is padded to whole 16-byte accesses (Inductor's ``pad_mm``), which costs a copy of
  each operand that grows. Inductor tries both on the GPU and keeps the faster; here every Tensor Core
  product of enough arithmetic intensity is padded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from tilefit.cost.tiles import round_up
from tilefit.ops import FORWARD, OPTIMIZER, Conv, Gemm, Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import elements_per_access, size_bytes

#: Roles that fuse.
_FUSIBLE = ("softmax", "normalization", "reduction", "pointwise", "copy")
#: FLOP per byte from which a misaligned product is padded: about the ops:byte ratio of a V100 or A100, below
#: which the copies would cost as much as they save.
_PADDED_INTENSITY = 140
#: The sizes of each operand.
_SIZES = {"A": ("m", "k"), "B": ("k", "n")}


@dataclass(slots=True)
class _Chain:
    """Operations that become one kernel."""

    graph: tuple[bool, bool]
    members: list[int] = field(default_factory=list)
    #: Where the fused kernel stands: its last member before anyone outside read a result.
    position: int = -1
    #: First operation outside that read a result; -1 while there is none.
    escape: int = -1
    #: Results that need the whole grid before they can be used.
    barriers: set[int] = field(default_factory=set)


def fuse(step: Step) -> Step:
    """The step as a compiled model would run it; memory is left as it was."""
    chain_of: dict[int, _Chain] = {}
    producer: dict[int, int] = {}
    outside_readers: set[tuple[int, int]] = set()
    read_ever: set[tuple[int, int]] = set()
    sources: list[tuple[tuple[TensorRef, int], ...]] = []
    for index, entry in enumerate(step.ops):
        reads = tuple((ref, producer.get(ref.id, -1)) for ref in entry.inputs)
        sources.append(reads)
        chain = _join(index, entry, reads, chain_of)
        for ref, writer in reads:
            read_ever.add((writer, ref.id))
            source = chain_of.get(writer)
            if source is not None and source is not chain:
                outside_readers.add((writer, ref.id))
                if source.escape < 0:
                    source.escape = index
        if chain is not None:
            chain_of[index] = chain
            chain.members.append(index)
            if chain.escape < 0:
                chain.position = index
            if _reduces_everything(entry.op):
                chain.barriers.update(ref.id for ref in entry.outputs)
        for ref in entry.outputs:
            producer[ref.id] = index
    ops: list[StepOp] = []
    channels_last = not any(_is_grouped(entry.op) for entry in step.ops)
    for index, entry in enumerate(step.ops):
        chain = chain_of.get(index)
        if chain is None:
            if isinstance(entry.op, Conv) and channels_last:
                entry = replace(entry, op=replace(entry.op, channels_last=True))
            ops.extend(_padded(entry))
        elif index == chain.position:
            ops.append(_kernel(step, chain, sources, outside_readers, read_ever))
    return replace(step, ops=tuple(ops), settings=replace(step.settings, compiled=True))


def _join(
    index: int, entry: StepOp, reads: tuple[tuple[TensorRef, int], ...], chain_of: dict[int, _Chain]
) -> _Chain | None:
    """The chain an operation belongs to: a producer's if it can still take it, else a new one."""
    op = entry.op
    if not isinstance(op, Streaming) or op.role not in _FUSIBLE or entry.phase == OPTIMIZER:
        return None
    graph = (entry.phase == FORWARD, entry.recomputed)
    for _, writer in reversed(reads):
        chain = chain_of.get(writer)
        if chain is None or chain.graph != graph:
            continue
        # What was produced before a result left the chain cannot depend on that result.
        independent = all(
            chain.escape < 0 or source < chain.escape or chain_of.get(source) is chain for _, source in reads
        )
        waits = any(chain_of.get(source) is chain and ref.id in chain.barriers for ref, source in reads)
        if independent and not waits:
            return chain
    return _Chain(graph)


def _padded(entry: StepOp) -> tuple[StepOp, ...]:
    """A misaligned product as padding makes it: a copy of each operand that grows, and the larger product."""
    gemm = entry.op
    if not isinstance(gemm, Gemm) or gemm.dtype in ("fp32", "fp64") or gemm.intensity < _PADDED_INTENSITY:
        return (entry,)
    access = elements_per_access(gemm.dtype)
    grown = {
        operand.contiguous: round_up(getattr(gemm, operand.contiguous), access)
        for operand in gemm.operands
        if operand.leading_dimension % access
    }
    if not grown:
        return (entry,)
    padded = replace(gemm, ld_a=0, ld_b=0, **grown)  # type: ignore[arg-type]
    copies = []
    for sizes in _SIZES.values():
        if grown.keys() & set(sizes):
            first, second = sizes
            before = gemm.batch * getattr(gemm, first) * getattr(gemm, second)
            after = gemm.batch * getattr(padded, first) * getattr(padded, second)
            size = size_bytes(gemm.dtype)
            copy = Streaming("copy", after, before * size, after * size, gemm.dtype)
            copies.append(replace(entry, op=copy, name="pad", inputs=(), outputs=()))
    return (*copies, replace(entry, op=padded))


def _is_grouped(op: object) -> bool:
    return isinstance(op, Conv) and op.groups > 1 and not op.is_depthwise


def _reduces_everything(op: object) -> bool:
    if not isinstance(op, Streaming) or op.role != "reduction":
        return False
    return op.inner == op.elements or (op.inner == 0 and not op.strided)


def _bytes(ref: TensorRef) -> int:
    return prod(ref.shape) * size_bytes(ref.dtype)


def _kernel(
    step: Step,
    chain: _Chain,
    sources: list[tuple[tuple[TensorRef, int], ...]],
    outside_readers: set[tuple[int, int]],
    read_ever: set[tuple[int, int]],
) -> StepOp:
    """The one kernel that a chain becomes."""
    members = set(chain.members)
    inputs: dict[tuple[int, int], TensorRef] = {}
    outputs: dict[int, TensorRef] = {}
    read_bytes: dict[tuple[int, int], int] = {}
    write_bytes = 0
    parts: list[Streaming] = []
    for index in chain.members:
        entry = step.ops[index]
        op = entry.op
        assert isinstance(op, Streaming)
        parts.append(op)
        if not entry.inputs:
            read_bytes[index, -1] = op.read_bytes
        for ref, writer in sources[index]:
            if writer not in members:
                inputs[writer, ref.id] = ref
                # A broadcast view is larger than what is read of it.
                seen = min(_bytes(ref), op.read_bytes)
                read_bytes[writer, ref.id] = max(read_bytes.get((writer, ref.id), 0), seen)
        for ref in entry.outputs:
            if (index, ref.id) in outside_readers or (index, ref.id) not in read_ever:
                outputs[ref.id] = ref
                write_bytes += min(_bytes(ref), op.write_bytes)
    # Statistics over the batch need the whole grid before they can be used: their inputs are read twice.
    again = sum(part.read_bytes for part in parts if "batch_norm" in part.function)
    largest = max(parts, key=lambda part: part.elements)
    first = step.ops[chain.members[0]]
    names = dict.fromkeys(step.ops[index].name.removeprefix("aten.") for index in chain.members)
    return StepOp(
        Streaming(
            role="pointwise",
            elements=largest.elements,
            read_bytes=sum(read_bytes.values()) + again,
            write_bytes=write_bytes,
            dtype=largest.dtype,
            flop_per_element=sum(part.flop for part in parts) / largest.elements if largest.elements else 0.0,
            strided=any(part.strided for part in parts if part.role in ("copy", "pointwise")),
        ),
        phase=first.phase,
        site=first.site,
        name=first.name if len(parts) == 1 else f"fused({', '.join(name for name in names if name)})",
        inputs=tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        recomputed=first.recomputed,
    )
