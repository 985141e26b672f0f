"""Chains of streaming operations that ``torch.compile`` makes one kernel of each.

- Pointwise operations, copies and casts, reductions, normalizations, softmax, losses, embeddings, indexing
  and pooling are generated code and fuse with the producers of their inputs. Products, convolutions,
  attention, sorts and the optimizer stay as they are. The forward and the backward graph are compiled apart.
- A result used only inside its kernel is never written, and what only other kernels compute again is made by
  none. One that a library's kernel reads, or the caller, is written once.
  What another generated kernel reads, in the backward pass above all, is computed again from what lies in
  memory where that moves no more bytes than writing and reading the result; random numbers, sums and the
  softmax of attention are not computed again.
  What is kept for the backward pass is the smaller of a result and of what it is made of, beside what is kept
  anyway (the partitioner's smallest cut): a sum of two tensors, a crop of what a convolution returns.
- A layer norm keeps its normalised input for the backward pass, not the input, unless that is smaller.
- Kernels that only read the same are not joined (Inductor's horizontal fusion): over 150 recorded steps that
  made no difference.
- Pooling reads what it pools from memory, and no sum or norm is fused with its gradient.
- A kernel has rows of one kind: what normalises or reduces others is another kernel.
- A sum across rows or over everything is a kernel of its own: who needs its result must wait for the whole
  grid. So must the users of statistics over a batch, and those of a table that is added to, or of a tensor
  that is written to in part: the compiler makes a new one of it, and copies the rest (a selective scan by
  doubling, in place, on an H100: 14.8 ms of kernels as written, compiled 16.7).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tilefit.cost.lowering import ADDING, INDUCTOR, Value, is_generated, is_scattered
from tilefit.ops import FORWARD, Conv, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import size_bytes

#: Functions whose result is never computed again.
_KEPT = frozenset(INDUCTOR.kept.split())
#: Operations in a row that are computed again at most (``torch._inductor.config.realize_opcount_threshold``).
_MOST_OPERATIONS = 30

#: Roles of generated code that the partitioner of the two passes takes for what fuses with nothing.
_UNFUSED = ("embedding", "pooling")

#: What must be read to have a value, with the bytes.
Roots = dict[Value, int]


@dataclass(slots=True)
class Chain:
    """Operations that become one kernel."""

    graph: tuple[bool, bool]
    members: list[int] = field(default_factory=list)
    #: Bytes read, by what is read and by the member that reads it.
    reads: dict[Value, dict[int, int]] = field(default_factory=dict)
    #: Other chains' members whose results are computed again.
    again: set[int] = field(default_factory=set)
    #: Where the fused kernel stands: its last member before anyone outside read a result.
    position: int = -1
    #: First operation outside that read a result; -1 while there is none.
    escape: int = -1
    #: Results that need the whole grid before they can be used.
    sums: dict[int, int] = field(default_factory=dict)


class Chains:
    """The chains of a step."""

    def __init__(self, ops: list[StepOp], returned: Collection[int]) -> None:
        self.ops = ops
        #: Images lie in NHWC.
        self.last = any(isinstance(entry.op, Conv) and entry.op.channels_last for entry in ops)
        self.of: dict[int, Chain] = {}
        self.refs: dict[Value, TensorRef] = {}
        #: Who wrote the inputs of each operation.
        self.sources: list[tuple[tuple[TensorRef, int], ...]] = []
        #: What is written to memory.
        self.written: set[Value] = set()
        #: Bytes of the rest of a tensor, by the operation that writes to a part of it in place and is read.
        self.rest: dict[int, int] = {}
        #: Layer norms by the input whose normalised form they keep.
        self.normalised: dict[Value, Value] = {}
        producer: dict[int, int] = {}
        whole: dict[int, int] = {}
        given: dict[int, int] = {}
        read: set[Value] = set()
        for index, entry in enumerate(ops):
            self.sources.append(tuple((ref, producer.get(ref.id, -1)) for ref in entry.inputs))
            values = {(writer, ref.id): ref for ref, writer in self.sources[-1]}
            read.update(values)
            if not is_generated(entry):
                self.written.update(values)
            for value, ref in values.items():
                self.refs.setdefault(value, ref)
                given[ref.id] = max(ref.bytes, given.get(ref.id, 0))
            for ref in entry.outputs:
                if (rest := whole.setdefault(ref.id, ref.bytes) - ref.bytes) > 0:
                    self.rest[index] = rest
                producer[ref.id] = index
                self.refs[index, ref.id] = ref
        #: What is there in the backward pass whatever is computed again: what it reads, and what is given.
        self.kept = {value for value in self.refs if value[0] < 0}
        for entry, sources in zip(ops, self.sources, strict=True):
            if entry.phase != FORWARD:
                self.kept.update((writer, ref.id) for ref, writer in sources)
        self.rest = {index: self.rest[index] for index, _ in read if index in self.rest}
        self.written.update(value for value in self.refs if value not in read and not self._is_dead(value))
        self.written.update((producer[number], number) for number in producer.keys() & set(returned))
        self.apart = self._used_apart(given)
        needed = self.written.copy()
        for index, entry in enumerate(ops):
            if is_generated(entry):
                self._add(index, entry)
                continue
            for ref, writer in self.sources[index]:
                self._escapes((writer, ref.id), index)
        self._leave_out(needed)

    def _used_apart(self, sizes: Mapping[int, int]) -> set[int]:
        """Operations of the forward pass that are not computed again in the backward pass: they use what
        another used before, and what follows from that has met a library's kernel meanwhile (the
        partitioner's ``ban_recompute_used_far_apart``), as the additions to a residual stream.

        Args:
            sizes: Bytes of tensors by number. Of what is given, a view fuses.
        """
        fuses = [is_generated(entry) and entry.op.category not in _UNFUSED for entry in self.ops]
        # The first operation that each leads to and does not fuse with, or that another on the way does not.
        met = [len(fuses)] * (len(fuses) + 1)
        users: dict[Value, list[int]] = defaultdict(list)
        for index in reversed([i for i, entry in enumerate(self.ops) if entry.phase == FORWARD]):
            for ref, writer in self.sources[index]:
                met[writer] = min(met[writer], met[index] if fuses[writer] and fuses[index] else index)
                if fuses[writer] if writer >= 0 else ref.bytes < sizes[ref.id]:
                    users[writer, ref.id].append(index)
        firsts = ((min(met[reader] for reader in readers), readers) for readers in users.values())
        return {reader for first, readers in firsts for reader in readers if reader > first and fuses[reader]}

    def _position(self, writer: int) -> int:
        """Where what an operation writes is there."""
        chain = self.of.get(writer)
        return chain.position if chain else writer

    def _leave_out(self, needed: set[Value]) -> None:
        """Leave out what none needs but who computes it again: no kernel makes that.

        Args:
            needed: What must be in memory, whoever else reads it: what libraries read, and results.
        """
        self.written = needed
        inside: set[Value] = set()
        for index in sorted(self.of, reverse=True):
            chain, outputs = self.of[index], self.ops[index].outputs
            made = {(index, -1 - index), *((index, ref.id) for ref in outputs)}
            if outputs and made.isdisjoint(inside) and made.isdisjoint(needed):
                chain.members.remove(index)
                for readers in chain.reads.values():
                    readers.pop(index, None)
                continue
            inside.update(
                (writer, ref.id) for ref, writer in self.sources[index] if self.of.get(writer) is chain
            )
            needed.update(root for root, readers in chain.reads.items() if index in readers)
        for chain in self.of.values():
            chain.reads = {root: readers for root, readers in chain.reads.items() if readers}

    def streaming(self, index: int) -> Streaming:
        """An operation of a chain."""
        op = self.ops[index].op
        assert isinstance(op, Streaming)
        return op

    def _is_dead(self, value: Value) -> bool:
        """Whether a result that nobody reads is dropped: attention makes weights on its way and returns none.
        Any other is a result of the step."""
        after = value[0] + 1
        call = self.ops[value[0]].site.fallback
        return call is not None and after < len(self.ops) and self.ops[after].site.fallback == call

    def _escapes(self, value: Value, reader: int) -> None:
        source = self.of.get(value[0])
        if source is not None and source is not self.of.get(reader) and source.escape < 0:
            source.escape = reader

    def _add(self, index: int, entry: StepOp) -> None:
        op = self.streaming(index)
        needs = {}
        for ref, writer in self.sources[index]:
            value = (writer, ref.id)
            if "backward" in op.function and op.role == "normalization":
                value = self.normalised.get(value, value)
            # A broadcast view is larger than what is read of it.
            size = min(ref.bytes, op.read_bytes)
            needs[value] = (
                {value: size} if op.role == "pooling" else self.roots(value, size, entry.phase == FORWARD)
            )
        chain = self.of[index] = self._join(index, entry, needs)
        chain.members.append(index)
        if chain.escape < 0:
            chain.position = index
        if adds_across(op) or op.function in ADDING or index in self.rest:
            chain.sums.update((ref.id, ref.elements * adds_across(op)) for ref in entry.outputs)
        elif made_of := list(self._sums_of(chain, needs)):
            chain.sums.update((ref.id, max(made_of)) for ref in entry.outputs)
        for value, roots in needs.items():
            if self.of.get(value[0]) is chain:
                continue
            self._compute_again(chain, value, roots)
            for root, size in roots.items():
                if self.of.get(root[0]) is not chain:
                    self.written.add(root)
                    self._escapes(root, index)
                    chain.reads.setdefault(root, {})[index] = size
        if op.role == "normalization" and "layer_norm" in op.function and "backward" not in op.function:
            self._normalise(index, op)

    def _normalise(self, index: int, op: Streaming) -> None:
        """Keep the normalised input where what it is made of is no smaller."""
        ref, writer = self.sources[index][0]
        size = op.elements * size_bytes("fp32")
        if sum(self.roots((writer, ref.id), ref.bytes).values()) >= size:
            kept = (index, -1 - index)
            self.refs[kept] = TensorRef(kept[1], ref.shape, "fp32")
            self.normalised[writer, ref.id] = kept

    def _compute_again(self, chain: Chain, value: Value, roots: Roots) -> None:
        """Note what a chain computes again to have a value from its roots."""
        writer = value[0]
        if value in roots or writer in chain.again or self.of.get(writer, chain) is chain:
            return
        if self.streaming(writer).role != "normalization":  # which is kept but for its scale and shift
            chain.again.add(writer)
            for ref, source in self.sources[writer]:
                self._compute_again(chain, (source, ref.id), roots)

    def roots(
        self,
        value: Value,
        size: int,
        forward: bool = False,
        most: int = _MOST_OPERATIONS,
        known: dict[Value, Roots] | None = None,
    ) -> Roots:
        """What must be read to have a value in one of the two passes, with the bytes: itself, or what it is
        computed from again."""
        known = {} if known is None else known
        if value in known:
            return known[value]
        known[value] = {value: size}
        writer = value[0]
        if not most or writer not in self.of or value in self.written or value[1] < 0:
            return known[value]
        op = self.streaming(writer)
        dropped = op.function == "native_dropout"
        outputs = self.ops[writer].outputs
        apart = not forward and writer in self.apart
        if apart or writer in self.rest or _is_kept(op) or (dropped and value[1] != outputs[0].id):
            return known[value]
        roots: Roots = {}
        for ref, source in self.sources[writer]:
            read = (source, ref.id)
            if op.role == "normalization" and read in self.normalised:
                roots = {self.normalised[read]: op.elements * size_bytes("fp32")}
                break
            least = min(ref.bytes, op.read_bytes)
            for root, root_size in self.roots(read, least, forward, most - 1, known).items():
                roots[root] = max(root_size, roots.get(root, 0))
        if dropped:
            roots[writer, outputs[-1].id] = outputs[-1].bytes
        between = not forward and self.ops[writer].phase == FORWARD
        instead = sum(each for root, each in roots.items() if between and root not in self.kept)
        limit = self.refs[value].bytes
        if sum(roots.values()) <= size + limit and instead <= limit:
            known[value] = roots
        return known[value]

    def _join(self, index: int, entry: StepOp, needs: dict[Value, Roots]) -> Chain:
        """The chain an operation belongs to: a producer's if it can still take it, else a new one.

        Args:
            needs: What it reads, and what must be read to have that.
        """
        op = self.streaming(index)
        graph = (entry.phase == FORWARD, entry.recomputed)
        reads = self.sources[index]
        # Who makes what cannot be computed again comes before who would be copied.
        writers = [writer for _, writer in reads] + [root[0] for roots in needs.values() for root in roots]
        for writer in () if adds_across(op) or op.role == "pooling" else reversed(writers):
            chain = self.of.get(writer)
            if chain is None or chain.graph != graph:
                continue
            inside = [self.streaming(i) for i in chain.members]
            if op.role != "pointwise" and any(map(is_scattered, inside)):
                continue
            if _rows(op) and any(_rows(each) not in (None, _rows(op)) for each in inside):
                continue
            # What was there before a result left the chain cannot depend on that result.
            outside = {root for value in needs if self.of.get(value[0]) is not chain for root in needs[value]}
            independent = chain.escape < 0 or all(
                self._position(writer) < chain.escape or self.of.get(writer) is chain for writer, _ in outside
            )
            # The last stage of a sum can go on with the sums themselves.
            waits = any(op.elements > size for size in self._sums_of(chain, (*needs, *outside)))
            if independent and not waits:
                return chain
        return Chain(graph)

    def _sums_of(self, chain: Chain, values: Iterable[Value]) -> Iterator[int]:
        """Sizes of the sums of a chain that values are, or are made of."""
        for writer, number in values:
            if self.of.get(writer) is chain and number in chain.sums:
                yield chain.sums[number]


def _rows(op: Streaming) -> tuple[int, bool] | None:
    """What it reduces or normalises together: how many, and whether across rows; a kernel has one kind."""
    is_norm = op.role in ("normalization", "reduction") and op.inner and not adds_across(op)
    return (op.inner, op.strided) if is_norm or op.role == "softmax" else None


def adds_across(op: Streaming) -> bool:
    """It adds across rows, or everything."""
    return op.role == "reduction" and op.inner in (0, op.elements)


def _is_kept(op: Streaming) -> bool:
    """Its result is never computed again: sums would have to be, random numbers cannot."""
    backward = "backward" in op.function and op.role in ("normalization", "softmax", "pooling")
    return backward or op.role == "reduction" or op.function in ADDING or op.function.strip("_") in _KEPT
