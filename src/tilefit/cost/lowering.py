"""The operations that Inductor makes kernels of, of those that PyTorch would run.

- The bias of a convolution is added by generated code: where the sum is kept, it is written once more.
- Pooling's indices are bytes (``_low_memory_max_pool_with_offsets``).
- What adds at places that an index tells (the gradients of an embedding, of a gather, of an interpolation) is
  a kernel that clears or copies the table, and atomic additions in the kernel that makes what is added. An
  interpolation has a table, in fp32, for each of its corners.
- Backward products of fp32 operands run in autocast's type: AOTAutograd traces the backward pass under the
  forward pass's autocast (``torch._functorch.config.backward_pass_autocast``).
- Convolutions of images run in NHWC where Inductor's layout optimization says so
  (``GraphLowering.decide_layout_opt``), those over one or three dimensions never.
- A misaligned product is padded to whole 16-byte accesses (Inductor's ``pad_mm``), which costs a copy of
  each operand that grows, and its memory: from when the operand is made, where that is in the same graph and
  in generated code. Inductor tries both on the GPU and keeps the faster; here every Tensor Core
  product of enough arithmetic intensity is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tilefit.cost.sums import SUMMED
from tilefit.cost.tables import facts
from tilefit.cost.tiles import round_up
from tilefit.ops import FORWARD, OPTIMIZER, Conv, Gemm, Op, Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import elements_per_access, size_bytes
from tilefit.ops.streaming import CONTIGUOUS
from tilefit.ops.timeline import INPUTS

#: ``StepOp.name`` of a copy that pads a product's operand.
PAD = "pad"
#: ``Streaming.function`` of the addition of a convolution's bias.
BIAS = "bias"
#: Roles that are generated code.
_GENERATED = "softmax normalization reduction pointwise copy loss embedding indexing pooling".split()
#: What was found of Inductor, with the sources.
INDUCTOR = facts("inductor")
#: Functions that Inductor leaves to ATen's own kernels, and that add at indexed places.
_LEFT_TO_ATEN, ADDING = frozenset(INDUCTOR.left_to_aten.split()), frozenset(INDUCTOR.adding.split())
_IMAGE = 2

#: A tensor at one point of the step: the index of the operation that wrote it (-1: none), and its number.
Value = tuple[int, int]


def lowered(step: Step) -> Iterator[StepOp]:
    """The operations that Inductor makes kernels of."""
    roles: dict[int, str] = {}
    data = {number for number, block in step.memory.timeline.blocks.items() if block.owner == INPUTS}
    channels_last = _channels_last(step.ops)
    # Whoever chose the layout, gradients of images then lie otherwise than the tables they are added to.
    strided = channels_last or any(isinstance(each.op, Conv) and each.op.channels_last for each in step.ops)
    for entry in _in_autocast_type(step):
        op = entry.op
        if entry.eager or _is_left(op):
            yield entry
        elif isinstance(op, Streaming) and op.function == CONTIGUOUS:
            continue
        elif isinstance(op, Streaming) and op.function in ADDING and entry.inputs and entry.outputs:
            # A loss lies as its labels do, other gradients as the convolutions want them.
            losses = roles.get(entry.inputs[0].id) in ("loss", "softmax")
            drawn = any(ref.id in data for ref in entry.inputs)
            yield from _added(entry, op, strided and not losses, entry.inputs[0].id in roles, drawn)
        elif isinstance(op, Streaming) and op.function.startswith("max_pool2d_with_indices"):
            yield _with_offsets(entry, op)
        elif isinstance(op, Streaming) and op.function == "gather" and _names_rows(entry, op):
            yield replace(entry, op=replace(op, function="index"))
        elif isinstance(op, Streaming) and op.function == SUMMED:  # in rows, unless they lie in NHWC
            last = strided and len(entry.inputs[0].shape) == 2 + _IMAGE
            inner = 0 if last else op.elements // entry.outputs[0].elements
            yield replace(entry, op=replace(op, inner=inner))
        elif isinstance(op, Streaming) and op.function == "native_batch_norm_backward":
            yield replace(entry, inputs=(*entry.inputs[:3], *entry.inputs[-2:]))
        elif isinstance(op, Conv):
            last = op.channels_last or (channels_last and len(op.kernel_size) == _IMAGE)
            yield replace(entry, op=replace(op, channels_last=last, bias=False))
            if op.bias and entry.phase == FORWARD and entry.outputs:  # is added in place, with what follows
                out = entry.outputs[0]
                bias = Streaming("pointwise", out.elements, out.bytes, out.bytes, out.dtype, function=BIAS)
                yield replace(entry, op=bias, name="aten.add", inputs=(out,))
        else:
            yield entry
        roles.update((ref.id, op.category) for ref in entry.outputs)


def is_generated(entry: StepOp) -> bool:
    """Inductor writes its kernel."""
    is_left = entry.eager or entry.phase == OPTIMIZER or _is_left(entry.op)
    return entry.op.category in _GENERATED and not is_left


def _is_left(op: Op) -> bool:
    """Inductor leaves it to ATen's own kernel."""
    if not isinstance(op, Streaming):
        return False
    function = op.function.removesuffix("_")
    # Atomic additions of bf16 were slow when it began to (torch._inductor.decomposition.index_add).
    is_slow = (function == "index_add" and op.dtype == "bf16") or op.dtype.startswith("complex")
    return op.function in _LEFT_TO_ATEN or is_slow


def is_scattered(op: Streaming) -> bool:
    """Its kernel looks into windows, which is done once: sums and norms are not fused with it."""
    return op.role == "pooling" and "backward" in op.function


def flop_of(op: Streaming) -> float:
    """What a generated kernel computes for it beside moving its bytes."""
    known: dict[str, float] = INDUCTOR.work
    if is_scattered(op):
        return op.elements * op.flop_per_element * known["window"]
    return op.elements * known.get(op.function.strip("_"), op.flop_per_element)


def _names_rows(entry: StepOp, op: Streaming) -> bool:
    """An index is expanded along the last dimension: it is read once a row, and its rows are read whole."""
    values = [ref.bytes for ref in entry.inputs if not ref.dtype.startswith("int")]
    read = op.read_bytes - (op.write_bytes if op.function == "gather" else sum(values))
    return any(read * ref.shape[-1] == ref.bytes > read for ref in entry.inputs if ref.dtype == "int64")


def _with_offsets(entry: StepOp, op: Streaming) -> StepOp:
    """Pooling whose indices are offsets within the window, of a byte each."""
    sides = entry.inputs, entry.outputs
    read, written = (7 * sum(ref.elements for ref in refs if ref.dtype == "int64") for refs in sides)
    inputs, outputs = (
        tuple(replace(ref, dtype="int8") if ref.dtype == "int64" else ref for ref in refs) for refs in sides
    )
    op = replace(op, read_bytes=op.read_bytes - read, write_bytes=op.write_bytes - written)
    return replace(entry, op=op, inputs=inputs, outputs=outputs)


def _added(entry: StepOp, op: Streaming, strided: bool, given: bool, drawn: bool) -> Iterator[StepOp]:
    """An operation that adds at indexed places: what makes the table, and the additions.

    Args:
        strided: What is added lies in memory otherwise than the table.
        given: An operation wrote the first input. A table that none wrote is full of zeros.
        drawn: The places are the model's input. Where they are distances, neighbours have the same.
    """
    table = entry.outputs[0]
    from_nothing = "backward" in op.function
    grad = max(entry.inputs, key=lambda ref: ref.bytes) if from_nothing else entry.inputs[-1]
    tables = INDUCTOR.corners.get(op.function.split("_")[1], 1)
    elements = grad.elements * tables
    interpolated = "upsample" in op.function
    size = size_bytes("fp32" if interpolated else table.dtype)
    made = table.elements * size * tables
    # Several tables are read by who adds them up, beside the one that it reads as the result.
    source = entry.inputs[:1] if given and not from_nothing else ()
    read = made if source else made - made // tables
    clear = Streaming("pointwise", table.elements, read, made, table.dtype)
    yield replace(entry, op=clear, name="aten.zeros", inputs=source, outputs=())
    rows = max((ref.elements for ref in entry.inputs if ref.dtype.startswith("int")), default=1)
    rows //= table.shape[-1] if _names_rows(entry, op) else 1
    stores = entry.phase == FORWARD and not op.function.endswith("_add")  # most likely
    if interpolated:
        work = INDUCTOR.scattered_work if strided else INDUCTOR.added_work
    elif stores:
        work = 1.0
    elif elements >= INDUCTOR.short_row * rows:
        work = INDUCTOR.added_work
    elif elements >= INDUCTOR.contended * table.elements:
        work = INDUCTOR.drawn_work if drawn else INDUCTOR.contended_work
    else:
        is_narrow = size_bytes(table.dtype) < size_bytes("fp32")
        work = INDUCTOR.narrow_work if is_narrow else INDUCTOR.scattered_work
    added = replace(op, elements=elements, write_bytes=elements * size, kernels=1, flop_per_element=work)
    yield replace(entry, op=added)


def _in_autocast_type(step: Step) -> Iterable[StepOp]:
    """The operations with backward products in autocast's type, casts right after what made the operands."""
    narrow_type = step.settings.amp
    if not narrow_type:
        return step.ops
    ops, producer, narrow = list[StepOp](), dict[int, int](), set[int]()
    #: By the operation they follow, and what they cast.
    casts: dict[int, dict[tuple[int, int], StepOp]] = {}
    fresh = 1 + max((ref.id for entry in step.ops for ref in (*entry.inputs, *entry.outputs)), default=0)

    def cast(ref: TensorRef, index: int) -> TensorRef:
        nonlocal fresh
        writer = producer.get(ref.id, -1)
        source = step.ops[writer] if writer >= 0 else step.ops[index]
        after = casts.setdefault(writer if writer >= 0 else index - 1, {})
        if (writer, ref.id) not in after:
            made, size = replace(ref, id=fresh, dtype=narrow_type), ref.elements
            copy = Streaming("copy", size, 4 * size, 2 * size, "fp32", function="_to_copy")
            after[writer, ref.id] = StepOp(copy, source.phase, source.site, "aten._to_copy", (ref,), (made,))
            fresh += 1
        return after[writer, ref.id].outputs[0]

    for index, entry in enumerate(step.ops):
        inputs = tuple(replace(ref, dtype=narrow_type) if ref.id in narrow else ref for ref in entry.inputs)
        narrow.difference_update(ref.id for ref in entry.outputs)
        op = entry.op
        is_backward = entry.phase.startswith("backward") and not entry.eager
        if isinstance(op, Gemm) and is_backward and op.dtype in ("fp32", "tf32"):
            inputs = tuple(cast(ref, index) if ref.dtype == "fp32" else ref for ref in inputs)
            outputs = tuple(replace(ref, dtype=narrow_type) for ref in entry.outputs)
            entry = replace(entry, op=replace(op, dtype=narrow_type), outputs=outputs)
            narrow.update(ref.id for ref in outputs)
        ops.append(replace(entry, inputs=inputs))
        producer.update((ref.id, index) for ref in entry.outputs)
    return [op for i, entry in enumerate(ops, -1) for op in (*casts.get(i, {}).values(), entry)]


def _channels_last(ops: Iterable[StepOp]) -> bool:
    """Inductor's ``decide_layout_opt`` for training, on the forward pass."""
    forward = [entry for entry in ops if entry.phase == FORWARD]
    convs = [entry.op for entry in forward if isinstance(entry.op, Conv)]
    if not convs or len(forward) >= INDUCTOR.few_convolutions * len(convs):
        return False
    channels = [(conv.group_channels[0], conv.out_channels) for conv in convs]
    grouped = any(conv.groups > 1 and not conv.is_depthwise for conv in convs)
    narrowing = any(
        2 * wide_out <= wide_in and conv.kernel_size[0] > 1
        for conv, (wide_in, wide_out) in zip(convs, channels, strict=True)
    )
    return not grouped and not narrowing and max(map(max, channels)) > INDUCTOR.small_channels


@dataclass(frozen=True, slots=True)
class _Pad:
    """A padded copy of an operand, in elements; the operand is None where it is not known."""

    operand: Value | None
    before: int
    after: int
    dtype: str


def padding(entry: StepOp, sources: tuple[tuple[TensorRef, int], ...]) -> tuple[Op, list[_Pad]]:
    """A misaligned product as padding makes it: the larger product, and a copy of each operand that grows.
    Any other operation as it is."""
    gemm, least = entry.op, INDUCTOR.padded_intensity
    if entry.eager or not isinstance(gemm, Gemm):
        return gemm, []
    if gemm.dtype in ("fp32", "fp64") or gemm.intensity < least:
        return gemm, []
    access = elements_per_access(gemm.dtype)
    grown = {
        operand.contiguous: round_up(getattr(gemm, operand.contiguous), access)
        for operand in gemm.operands
        if operand.leading_dimension % access
    }
    if not grown:
        return gemm, []
    padded = replace(gemm, ld_a=0, ld_b=0, **grown)  # type: ignore[arg-type]
    operands = [(ref.elements, (writer, ref.id)) for ref, writer in sources]
    pads = []
    for first, second in (("m", "k"), ("k", "n")):
        if grown.keys() & {first, second}:
            before = gemm.batch * getattr(gemm, first) * getattr(gemm, second)
            after = gemm.batch * getattr(padded, first) * getattr(padded, second)
            # The two operands of a product, if they are of one size, do not share a copy.
            found = next((each for each in operands if each[0] == before), None)
            if found is not None:
                operands.remove(found)
            pads.append(_Pad(found[1] if found else None, before, after, gemm.dtype))
    return padded, pads


def padded(
    entry: StepOp, sources: tuple[tuple[TensorRef, int], ...], copies: set[tuple[Value, int]]
) -> Iterator[StepOp]:
    """An operation behind the copies that pad its operands; the two products of a gradient share its copy."""
    op, pads = padding(entry, sources)
    for pad in pads:
        if pad.operand is None or (pad.operand, pad.after) not in copies:
            size = size_bytes(pad.dtype)
            copy = Streaming("copy", pad.after, pad.before * size, pad.after * size, pad.dtype)
            yield replace(entry, op=copy, name=PAD, inputs=(), outputs=())
        if pad.operand is not None:
            copies.add((pad.operand, pad.after))
    yield replace(entry, op=op)
