"""What compilation does to a step: chains of streaming operations become one kernel each.

A model of ``torch.compile`` (Inductor, 2.11 to 2.13), compared with what Inductor schedules by
``benchmarks/inductor_kernels.py``. Its assumptions:

- Pointwise operations, copies and casts, reductions, normalizations, softmax, losses, embeddings, indexing
  and pooling are generated code and fuse with the producers of their inputs. Products, convolutions,
  attention, sorts and the optimizer stay as they are. The forward and the backward graph are compiled apart.
- A result used only inside its kernel is never written, and what only other kernels compute again is made by
  none. One that a library's kernel reads, or the caller, is written once.
  What another generated kernel reads, in the backward pass above all, is computed again from what lies in
  memory where that moves no more bytes than writing and reading the result; random numbers, sums and the
  softmax of attention are not computed again.
- Between the two graphs lies what AOTAutograd saves: the result of a softmax is computed again from its input
  where that is smaller, that of a batch norm by whatever generated kernel reads it; joined tensors and
  interpolations are not. Group norms would be, too, but the one model of them that was measured takes the
  memory of results that are kept.
- A module that runs a recurrent layer is not compiled, nor what it calls: Dynamo skips it
  (``torch._dynamo.config.allow_rnn``). Of three models on an H200 whose outermost module does, none ran a
  generated kernel. Nor is what a training step does beside its passes (:func:`beside`).
- A graph ends where a value of the GPU is read. Where that is in a loop, Dynamo leaves the whole function to
  Python, and modules of PyTorch's own classes that it calls; those of others are taken for left, too. A
  mixture of experts that asks each for its rows, compiled on an H100, ran 1,776 kernels in 7.9 ms, of 1,812
  in 8.1.
- A layer norm keeps its normalised input for the backward pass, not the input, unless that is smaller.
- Pointwise kernels over as many elements that read the same are one (horizontal fusion), where what the later
  one reads is there early enough.
- Pooling reads what it pools from memory, its indices are bytes (``_low_memory_max_pool_with_offsets``), and
  no sum or norm is fused with its gradient. Each of more than eight tensors that are joined is written to its
  place by a kernel.
- The bias of a convolution is added by generated code: where the sum is kept, it is written once more.
- A sum across rows or over everything is a kernel of its own, in two stages: who needs its result must wait
  for the whole grid. So must the users of statistics over a batch, who read once more what its input is made
  of, or the input, which is then written.
- What adds at places that an index tells (the gradients of an embedding, of a gather, of an interpolation) is
  a kernel that clears or copies the table, and atomic additions in the kernel that makes what is added; who
  needs the table waits for all of them. An interpolation has a table, in fp32, for each of its corners.
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

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tilefit import gpus
from tilefit.cost.conv_kernels import workspace_bytes
from tilefit.cost.streaming import BY_FUNCTION, GENERATED
from tilefit.cost.tiles import round_up
from tilefit.ops import FORWARD, OPTIMIZER, Conv, Gemm, Memory, Op, Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import elements_per_access, size_bytes
from tilefit.ops.peaks import fullest
from tilefit.ops.program import WAIT, Program
from tilefit.ops.scaling import tensors_that_stay
from tilefit.ops.streaming import CONTIGUOUS
from tilefit.ops.timeline import Timeline

#: ``StepOp.name`` of a copy that pads a product's operand.
PAD = "pad"
#: ``Streaming.function`` of the addition of a convolution's bias.
BIAS = "bias"
#: Roles that are generated code.
_GENERATED = "softmax normalization reduction pointwise copy loss embedding indexing pooling".split()
#: Functions that Inductor leaves to ATen's own kernels, whose result is never computed again, and that add at
#: indexed places; by function further kernels of sums, and FLOP per element.
_LEFT_TO_ATEN, _KEPT, _ADDING = (
    frozenset(BY_FUNCTION["inductor"][which].split()) for which in ("left_to_aten", "kept", "adding")
)
_STAGES: dict[str, int] = BY_FUNCTION["inductor_stages"]
_WORK: dict[str, float] = BY_FUNCTION["inductor_work"]
#: Made again in the backward pass where what they are made of is smaller: by any kernel, by generated ones.
_MADE_AGAIN = ("softmax", "safe_softmax")
_MADE_AGAIN_IN_KERNELS = (*_MADE_AGAIN, "native_batch_norm")
#: Norms whose statistics need the whole grid, or too much of it, before they can be used.
_IN_TWO_PASSES = ("native_batch_norm", "native_group_norm")
#: Work of one window that an element of a gradient of pooling looks into (``Op.flop_per_element``):
#: ResNet-50's on an H200 takes 1.6 ps, VGG-16's 2.0, SqueezeNet's on an H100 2.3.
_WINDOW_WORK = 130.0
#: Additions for each element of an interpolation's gradient: the corners that it reads, where it reads more
#: than the nearest.
_CORNERS = {"linear1d": 2, "bilinear2d": 4, "trilinear3d": 8, "bicubic2d": 16}
#: Work of one addition, likewise, where neighbouring threads add to the same line (SegFormer's scores and the
#: field of the registration: 2.8 and 3.2 ps), where each adds to another one (SegFormer's features, in NHWC
#: into tables in NCHW: 10.6 to 13.3 ps), the same in a 2-byte type (DeBERTa's scores: 18.6 ps), and where so
#: many add to a row so short that they wait for each other (T5's relative positions, 8192 a word: 1.07 ns).
#: Longer rows are added like neighbours (attention over the edges of a graph on an H100: 3.6 ps).
_ADDED_WORK = 187.0
_SCATTERED_WORK = 790.0
_NARROW_WORK = 1240.0
_CONTENDED_WORK = 7.2e4
_CONTENDED = 1024
_SHORT_ROW = 32
#: Operations in a row that are computed again at most (``torch._inductor.config.realize_opcount_threshold``).
_MOST_OPERATIONS = 30
#: Share of the operations of the passes, those of modules that read values in loops, from which on a step is
#: taken for one that is not compiled: the rest is in so many small graphs that it gains nothing (the mixture:
#: 0.8).
_LEFT_SHARE = 0.5
#: Tensors that one kernel joins at most (``torch._inductor.config.max_pointwise_cat_inputs``).
_MOST_JOINED = 8
#: FLOP per byte from which a misaligned product is padded: about the ops:byte ratio of a V100 or A100, below
#: which the copies would cost as much as they save.
_PADDED_INTENSITY = 140
#: ``decide_layout_opt``: graph nodes per convolution above which it is not worth it.
_FEW_CONVOLUTIONS = 300
_SMALL_CHANNELS = 64
_IMAGE = 2

#: The copies that convolutions make are the same on any GPU with Tensor Cores.
_ANY_GPU = "h200"

#: A tensor at one point of the step: the index of the operation that wrote it (-1: none), and its number.
_Value = tuple[int, int]
#: What must be read to have one, with the bytes.
_Roots = dict[_Value, int]


def fuse(step: Step) -> Step:
    """The step as a compiled model would run it; as it is where nothing of the model is compiled."""
    lowered = list(_lowered(step))
    reading = _reading_in_loops(step.program) if step.program else set()
    skipped = _skipped(lowered, reading)
    passes = [entry for entry in lowered if entry.phase != OPTIMIZER]
    if all(map(skipped, passes)) or sum(map(_within(reading), passes)) >= _LEFT_SHARE * len(passes):
        return replace(step, settings=replace(step.settings, compiled=False))
    fusion = _Fusion(lowered, skipped, step.returned)
    ops = tuple(fusion.kernels())
    return replace(
        step,
        ops=ops,
        program=step.program and step.program.moved(_places(step.ops, ops)),
        memory=fusion.memory(step, tensors_that_stay(step.ops, step.parameters)),
        settings=replace(step.settings, compiled=True),
    )


def beside(ops: Sequence[StepOp]) -> list[StepOp]:
    """What a training step does to its parameters beside its passes (moving averages of weights): forward
    operations of lines outside of all modules that touch parameters, and others of the same tensors, with
    results that no module, no loss and no backward pass reads."""
    graded = {entry.site.source for entry in ops if entry.phase not in (FORWARD, OPTIMIZER)}
    unread: list[StepOp] = []
    read: set[int] = set()
    for entry in reversed(ops) if graded else ():
        is_outside = entry.phase == FORWARD and not entry.site.module and entry.site.source not in graded
        if is_outside and read.isdisjoint(ref.id for ref in entry.outputs):
            unread.append(entry)
        elif entry.phase != OPTIMIZER:
            read.update(ref.id for ref in entry.inputs)
    refs = [(entry.site.source, (*entry.inputs, *entry.outputs)) for entry in unread]
    lines = {line for line, own in refs if any(ref.parameter for ref in own)}
    touched = {ref.id for line, own in refs if line in lines for ref in own}
    return [e for e in unread if e.site.source in lines or touched & {ref.id for ref in e.outputs}]


def _skipped(ops: Sequence[StepOp], reading: set[str]) -> Callable[[StepOp], bool]:
    """Tells the operations beside the passes, and those of modules, and of what they call, that run recurrent
    layers or are ``reading`` values in loops."""
    owners = {entry.site.module.rpartition(".")[0] for entry in ops if entry.op.kind == "recurrent"}
    others, inside = {*map(id, beside(ops))}, _within(owners | reading)
    return lambda entry: entry.phase == OPTIMIZER or id(entry) in others or inside(entry)


def _within(modules: set[str]) -> Callable[[StepOp], bool]:
    """Tells the operations of some modules and of what they call."""
    inside = tuple(module and f"{module}." for module in modules)
    return lambda entry: f"{entry.site.module}.".startswith(inside)


def _reading_in_loops(program: Program) -> set[str]:
    """The modules that read values of the GPU in one line several times in a forward pass."""
    reads = Counter((e.site.module, e.site.source) for e in program.events if e.kind == WAIT and e.within)
    passes = max(1, program.micro_batches)
    return {module for (module, _), times in reads.items() if module and times > passes}


def _places(ops: Sequence[StepOp], kernels: Sequence[StepOp]) -> Callable[[int], int]:
    """Where something is among kernels that was so far among operations: behind as large a share of its part
    of the step (which kernel an operation went into is not told)."""
    before, after = ([entry.phase.partition("-")[0] for entry in each] for each in (ops, kernels))
    places = {part: [index for index, each in enumerate(after, 1) if each == part] for part in set(before)}

    def place(index: int) -> int:
        earlier = before[:index]
        made = places[earlier[-1]] if earlier else []
        if not made:
            return 0
        part = earlier[-1]
        return made[-(-earlier.count(part) * len(made) // before.count(part)) - 1]

    return place


@dataclass(slots=True)
class _Chain:
    """Operations that become one kernel."""

    graph: tuple[bool, bool]
    members: list[int] = field(default_factory=list)
    #: Bytes read, by what is read and by the member that reads it.
    reads: dict[_Value, dict[int, int]] = field(default_factory=dict)
    #: Other chains' members whose results are computed again.
    again: set[int] = field(default_factory=set)
    #: Where the fused kernel stands: its last member before anyone outside read a result.
    position: int = -1
    #: First operation outside that read a result; -1 while there is none.
    escape: int = -1
    #: Results that need the whole grid before they can be used.
    sums: dict[int, int] = field(default_factory=dict)


class _Fusion:
    """The chains of a step."""

    def __init__(
        self, ops: list[StepOp], skipped: Callable[[StepOp], bool], returned: Collection[int] = ()
    ) -> None:
        self.ops = ops
        self.chains: dict[int, _Chain] = {}
        self.refs: dict[_Value, TensorRef] = {}
        #: Who wrote the inputs of each operation.
        self.sources: list[tuple[tuple[TensorRef, int], ...]] = []
        #: What is written to memory.
        self.written: set[_Value] = set()
        #: Layer norms by the input whose normalised form they keep.
        self.normalised: dict[_Value, _Value] = {}
        producer: dict[int, int] = {}
        read: set[_Value] = set()
        for index, entry in enumerate(ops):
            self.sources.append(tuple((ref, producer.get(ref.id, -1)) for ref in entry.inputs))
            values = {(writer, ref.id): ref for ref, writer in self.sources[-1]}
            read.update(values)
            if skipped(entry) or not _is_generated(entry):
                self.written.update(values)
            for value, ref in values.items():
                self.refs.setdefault(value, ref)
            for ref in entry.outputs:
                producer[ref.id] = index
                self.refs[index, ref.id] = ref
        self.written.update(value for value in self.refs if value not in read and not self._is_dead(value))
        self.written.update((producer[number], number) for number in producer.keys() & set(returned))
        needed = self.written.copy()
        for index, entry in enumerate(ops):
            if _is_generated(entry) and not skipped(entry):
                self._add(index, entry)
                continue
            for ref, writer in self.sources[index]:
                self._escapes((writer, ref.id), index)
        self._leave_out(needed)
        self._join_siblings()

    def _join_siblings(self) -> None:
        """Fuse chains over as many elements that read the same, where what the later one reads is there when
        the earlier one runs (Inductor's horizontal fusion)."""
        seen: dict[tuple[tuple[bool, bool], int, _Value], _Chain] = {}
        for chain in sorted(
            {id(c): c for c in self.chains.values() if c.members}.values(), key=lambda c: c.position
        ):
            ops = [self._streaming(index) for index in chain.members]
            elements = max(op.elements for op in ops)
            if any(op.role != "pointwise" or op.inner for op in ops):
                continue
            keys = [(chain.graph, elements, root) for root in chain.reads]
            ready = max((self._position(root[0]) for root in chain.reads), default=-1)
            earlier = next((seen[key] for key in keys if key in seen and ready < seen[key].position), None)
            into = chain if earlier is None else earlier
            if into is not chain:
                into.members += chain.members
                into.again |= chain.again
                for root, readers in chain.reads.items():
                    into.reads.setdefault(root, {}).update(readers)
                self.chains.update(dict.fromkeys(chain.members, into))
                chain.members = []
            seen.update((key, into) for key in keys if prod(self.refs[key[2]].shape) == elements)

    def _position(self, writer: int) -> int:
        """Where what an operation writes is there."""
        chain = self.chains.get(writer)
        return chain.position if chain else writer

    def _leave_out(self, needed: set[_Value]) -> None:
        """Leave out what none needs but who computes it again: no kernel makes that.

        Args:
            needed: What must be in memory, whoever else reads it: what libraries read, and results.
        """
        self.written = needed
        inside: set[_Value] = set()
        for index in sorted(self.chains, reverse=True):
            chain, outputs = self.chains[index], self.ops[index].outputs
            made = {(index, -1 - index), *((index, ref.id) for ref in outputs)}
            if outputs and made.isdisjoint(inside) and made.isdisjoint(needed):
                chain.members.remove(index)
                for readers in chain.reads.values():
                    readers.pop(index, None)
                continue
            inside.update(
                (writer, ref.id) for ref, writer in self.sources[index] if self.chains.get(writer) is chain
            )
            needed.update(root for root, readers in chain.reads.items() if index in readers)
        for chain in self.chains.values():
            chain.reads = {root: readers for root, readers in chain.reads.items() if readers}

    def _streaming(self, index: int) -> Streaming:
        op = self.ops[index].op
        assert isinstance(op, Streaming)
        return op

    def _is_dead(self, value: _Value) -> bool:
        """Whether a result that nobody reads is dropped: attention makes weights on its way and returns none.
        Any other is a result of the step."""
        after = value[0] + 1
        call = self.ops[value[0]].site.fallback
        return call is not None and after < len(self.ops) and self.ops[after].site.fallback == call

    def kernels(self) -> Iterator[StepOp]:
        """The step's operations, each chain as one."""
        copies: set[tuple[_Value, int]] = set()
        for index, entry in enumerate(self.ops):
            chain = self.chains.get(index)
            if chain is None:
                yield from _padded(entry, self.sources[index], copies)
            elif index == chain.position and chain.members:
                yield self._kernel(chain)

    def memory(self, step: Step, stay: Collection[int]) -> Memory:
        """What the step needs where only what is written takes memory, until it is read for the last time:
        results, and the copies that pad products; and, while they run, those that convolutions make.

        Args:
            step: As it runs without the compiler.
            stay: Numbers of the tensors that have their size whatever the batch.
        """
        made, last = self._lives()
        freed: dict[int, list[_Value]] = {}
        for value in (value for values in made.values() for value in values):
            freed.setdefault(last.get(value, len(self.ops)), []).append(value)
        live: dict[int, tuple[_Value, int]] = {}  # by number: what is written in place takes no more
        held = step.memory.fixed_bytes - step.memory.gradient_bytes
        now = {True: held, False: 0}  # does it stay whatever the batch?
        moments = []
        saved = 0
        for index, entry in enumerate(self.ops):
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

    def _lives(self) -> tuple[dict[int, dict[_Value, int]], dict[_Value, int]]:
        """The results and the copies that pad products, with their bytes, by the operation that makes them;
        and the last that reads each."""
        made: dict[int, dict[_Value, int]] = {}
        last: dict[_Value, int] = {}
        pads: dict[tuple[_Value | int, int, bool], _Value] = {}
        again: set[_Value] = set()
        for index, entry in enumerate(self.ops):
            chain = self.chains.get(index)
            position = chain.position if chain else index
            reads = chain.reads if chain else [(writer, ref.id) for ref, writer in self.sources[index]]
            for value in reads:
                saved = (value,) if entry.phase == FORWARD else self._saved(value, chain)
                last.update(dict.fromkeys(saved, position))
                again.update({value} - {*saved})
            if entry.phase == OPTIMIZER:
                continue
            for value in [(index, ref.id) for ref in entry.outputs] + [(index, -1 - index)]:
                if value in self.refs and (chain is None or value in self.written):
                    made.setdefault(position, {})[value] = _bytes(self.refs[value])
            for pad in _padding(entry, self.sources[index])[1]:
                # Each of the two graphs makes its own, where it can in the kernel that makes the operand.
                graph = entry.phase == FORWARD
                key = pad.operand or index, pad.after, graph
                if key not in pads:
                    pads[key] = index, -1 - len(self.ops) - len(pads)
                    source = self.chains.get(pad.operand[0]) if pad.operand else None
                    place = source.position if source and source.graph[0] == graph else index
                    made.setdefault(place, {})[pads[key]] = pad.after * size_bytes(pad.dtype)
                last[pads[key]] = index
        for value in again - last.keys():  # only for who computes it again: it stays in its kernel
            made[self.chains[value[0]].position].pop(value, None)
        return made, last

    def _saved(self, value: _Value, reader: _Chain | None) -> Collection[_Value]:
        """What is kept so that a chain of the backward pass, or a library's kernel, can have a value."""
        writer = value[0]
        made = writer in self.chains and value[1] >= 0 and self.ops[writer].phase == FORWARD
        again = _MADE_AGAIN if reader is None else _MADE_AGAIN_IN_KERNELS
        if not made or self._streaming(writer).function.strip("_") not in again:
            return (value,)
        ref, source = self.sources[writer][0]
        roots = self._roots((source, ref.id), _bytes(ref))
        return roots if sum(roots.values()) <= _bytes(self.refs[value]) else (value,)

    def _escapes(self, value: _Value, reader: int) -> None:
        source = self.chains.get(value[0])
        if source is not None and source is not self.chains.get(reader) and source.escape < 0:
            source.escape = reader

    def _add(self, index: int, entry: StepOp) -> None:
        op = self._streaming(index)
        needs = {}
        for ref, writer in self.sources[index]:
            value = (writer, ref.id)
            if "backward" in op.function and op.role == "normalization":
                value = self.normalised.get(value, value)
            # A broadcast view is larger than what is read of it.
            size = min(_bytes(ref), op.read_bytes)
            needs[value] = {value: size} if op.role == "pooling" else self._roots(value, size)
        chain = self.chains[index] = self._join(index, entry, needs)
        chain.members.append(index)
        if chain.escape < 0:
            chain.position = index
        if _sums(op) or op.function in _ADDING:
            chain.sums.update((ref.id, prod(ref.shape) * _sums(op)) for ref in entry.outputs)
        elif made_of := list(self._sums_of(chain, needs)):
            chain.sums.update((ref.id, max(made_of)) for ref in entry.outputs)
        for value, roots in needs.items():
            if self.chains.get(value[0]) is chain:
                continue
            self._compute_again(chain, value, roots)
            for root, size in roots.items():
                if self.chains.get(root[0]) is not chain:
                    self.written.add(root)
                    self._escapes(root, index)
                    chain.reads.setdefault(root, {})[index] = size
        if op.role == "normalization" and "layer_norm" in op.function and "backward" not in op.function:
            self._normalise(index, op)

    def _normalise(self, index: int, op: Streaming) -> None:
        """Keep the normalised input where what it is made of is no smaller."""
        ref, writer = self.sources[index][0]
        size = op.elements * size_bytes("fp32")
        if sum(self._roots((writer, ref.id), _bytes(ref)).values()) >= size:
            kept = (index, -1 - index)
            self.refs[kept] = TensorRef(kept[1], ref.shape, "fp32")
            self.normalised[writer, ref.id] = kept

    def _compute_again(self, chain: _Chain, value: _Value, roots: _Roots) -> None:
        """Note what a chain computes again to have a value from its roots."""
        writer = value[0]
        if value in roots or writer in chain.again or self.chains.get(writer, chain) is chain:
            return
        if self._streaming(writer).role != "normalization":  # which is kept but for its scale and shift
            chain.again.add(writer)
            for ref, source in self.sources[writer]:
                self._compute_again(chain, (source, ref.id), roots)

    def _roots(
        self,
        value: _Value,
        size: int,
        most: int = _MOST_OPERATIONS,
        known: dict[_Value, _Roots] | None = None,
    ) -> _Roots:
        """What must be read to have a value, with the bytes: itself, or what it is computed from again."""
        known = {} if known is None else known
        if value in known:
            return known[value]
        known[value] = {value: size}
        writer = value[0]
        if not most or writer not in self.chains or value in self.written or value[1] < 0:
            return known[value]
        op = self._streaming(writer)
        dropped = op.function == "native_dropout"
        outputs = self.ops[writer].outputs
        if _is_kept(op) or (dropped and value[1] != outputs[0].id):
            return known[value]
        roots: _Roots = {}
        for ref, source in self.sources[writer]:
            read = (source, ref.id)
            if op.role == "normalization" and read in self.normalised:
                roots = {self.normalised[read]: op.elements * size_bytes("fp32")}
                break
            least = min(_bytes(ref), op.read_bytes)
            for root, root_size in self._roots(read, least, most - 1, known).items():
                roots[root] = max(root_size, roots.get(root, 0))
        if dropped:
            roots[writer, outputs[-1].id] = _bytes(outputs[-1])
        if sum(roots.values()) <= size + _bytes(self.refs[value]):
            known[value] = roots
        return known[value]

    def _join(self, index: int, entry: StepOp, needs: dict[_Value, _Roots]) -> _Chain:
        """The chain an operation belongs to: a producer's if it can still take it, else a new one.

        Args:
            needs: What it reads, and what must be read to have that.
        """
        op = self._streaming(index)
        graph = (entry.phase == FORWARD, entry.recomputed)
        reads = self.sources[index]
        # Who makes what cannot be computed again comes before who would be copied.
        writers = [writer for _, writer in reads] + [root[0] for roots in needs.values() for root in roots]
        for writer in () if _sums(op) or op.role == "pooling" else reversed(writers):
            chain = self.chains.get(writer)
            if chain is None or chain.graph != graph:
                continue
            if op.role != "pointwise" and any(_is_scattered(self._streaming(i)) for i in chain.members):
                continue
            # What was there before a result left the chain cannot depend on that result.
            outside = {
                root for value in needs if self.chains.get(value[0]) is not chain for root in needs[value]
            }
            independent = chain.escape < 0 or all(
                self._position(writer) < chain.escape or self.chains.get(writer) is chain
                for writer, _ in outside
            )
            # The last stage of a sum can go on with the sums themselves.
            waits = any(op.elements > size for size in self._sums_of(chain, (*needs, *outside)))
            if independent and not waits:
                return chain
        return _Chain(graph)

    def _sums_of(self, chain: _Chain, values: Iterable[_Value]) -> Iterator[int]:
        """Sizes of the sums of a chain that values are, or are made of."""
        for writer, number in values:
            if self.chains.get(writer) is chain and number in chain.sums:
                yield chain.sums[number]

    def _second_pass(self, chain: _Chain, index: int) -> tuple[int, float]:
        """Bytes moved and FLOP before a norm can go on from its statistics: what its inputs are made of is
        read and computed once more, or the inputs are, which then are written."""
        before, open_ = {index}, [index]
        direct = 0
        while open_:
            for ref, writer in self.sources[reader := open_.pop()]:
                inside = self.chains.get(writer) is chain
                direct += (
                    (reader == index) * _bytes(ref) * (1 + (inside and (writer, ref.id) not in self.written))
                )
                if inside and writer not in before:
                    before.add(writer)
                    open_.append(writer)
        roots = sum(
            max(sizes)
            for readers in chain.reads.values()
            if (sizes := [readers[i] for i in before & {*readers}])
        )
        flop = sum(_flop(self._streaming(each)) for each in before - {index})
        return (roots, flop) if roots <= direct else (direct, 0.0)

    def _kernel(self, chain: _Chain) -> StepOp:
        """The one kernel that a chain becomes."""
        outputs: dict[int, TensorRef] = {}
        read_bytes = sum(max(readers.values()) for readers in chain.reads.values())
        write_bytes = 0
        flop = sum(_flop(self._streaming(index)) for index in chain.again)
        members = [(self.ops[index], self._streaming(index)) for index in chain.members]
        for index, (entry, op) in zip(chain.members, members, strict=True):
            flop += _flop(op)
            read_bytes += 0 if entry.inputs else op.read_bytes
            write_bytes += 0 if entry.outputs else op.write_bytes
            for ref in entry.outputs:
                if (index, ref.id) in self.written:
                    outputs[ref.id] = ref
                    write_bytes += min(_bytes(ref), op.write_bytes)
            if (index, -1 - index) in self.written:
                outputs[-1 - index] = self.refs[index, -1 - index]
                write_bytes += op.elements * size_bytes("fp32")
            if op.function.removesuffix("_backward") in _IN_TWO_PASSES:
                again_bytes, again_flop = self._second_pass(chain, index)
                read_bytes += again_bytes
                flop += again_flop
        parts = [op for _, op in members]
        # Each part of what many are joined to is written by a kernel, each table added to by another.
        joined = [len(entry.inputs) for entry, op in members if op.function in ("cat", "stack")]
        apart = sum(count - 1 for count in joined if count > _MOST_JOINED)
        apart += max(0, sum(op.function in _ADDING for op in parts) - 1)
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
                kernels=1 + sum(_STAGES.get(part.function, 0) + _sums(part) for part in parts) + apart,
            ),
            phase=first.phase,
            site=replace(first.site, fallback=calls.pop() if len(calls) == 1 else None),
            name=first.name if len(parts) == 1 else f"fused({', '.join(name for name in names if name)})",
            inputs=tuple(self.refs[value] for value in chain.reads),
            outputs=tuple(outputs.values()),
            recomputed=first.recomputed,
        )


def _while_updating(step: Step) -> Iterator[int]:
    """Bytes that are alive while the optimizer runs, which is not compiled."""
    first = next((i for i, entry in enumerate(step.ops) if entry.phase == OPTIMIZER), len(step.ops))
    alive = 0
    for _, index, size in step.memory.timeline.changes():
        alive += size
        if first <= index < len(step.ops):
            yield alive


def _is_generated(entry: StepOp) -> bool:
    return entry.op.category in _GENERATED and not _is_left(entry.op) and entry.phase != OPTIMIZER


def _is_left(op: Op) -> bool:
    """Inductor leaves it to ATen's own kernel."""
    if not isinstance(op, Streaming):
        return False
    function = op.function.removesuffix("_")
    # Atomic additions of bf16 were slow when it began to (torch._inductor.decomposition.index_add).
    return op.function in _LEFT_TO_ATEN or (function == "index_add" and op.dtype == "bf16")


def _bytes(ref: TensorRef) -> int:
    return prod(ref.shape) * size_bytes(ref.dtype)


def _sums(op: Streaming) -> bool:
    """It adds across rows, or everything."""
    return op.role == "reduction" and op.inner in (0, op.elements)


def _is_scattered(op: Streaming) -> bool:
    """Its kernel looks into windows, which is done once: sums and norms are not fused with it."""
    return op.role == "pooling" and "backward" in op.function


def _flop(op: Streaming) -> float:
    if _is_scattered(op):
        return op.elements * op.flop_per_element * _WINDOW_WORK
    return op.elements * _WORK.get(op.function.strip("_"), op.flop_per_element)


def _is_kept(op: Streaming) -> bool:
    """Its result is never computed again: sums would have to be, random numbers cannot."""
    backward = "backward" in op.function and op.role in ("normalization", "softmax", "pooling")
    return backward or op.role == "reduction" or op.function in _ADDING or op.function.strip("_") in _KEPT


def _lowered(step: Step) -> Iterator[StepOp]:
    """The operations that Inductor makes kernels of."""
    roles: dict[int, str] = {}
    channels_last = _channels_last(step.ops)
    # Whoever chose the layout, gradients of images then lie otherwise than the tables they are added to.
    strided = channels_last or any(isinstance(each.op, Conv) and each.op.channels_last for each in step.ops)
    for entry in _in_autocast_type(step):
        op = entry.op
        if isinstance(op, Streaming) and op.function == CONTIGUOUS:
            continue
        if _is_left(op):
            yield entry
        elif isinstance(op, Streaming) and op.function in _ADDING and entry.inputs and entry.outputs:
            # A loss lies as its labels do, other gradients as the convolutions want them.
            losses = roles.get(entry.inputs[0].id) in ("loss", "softmax")
            yield from _added(entry, op, strided and not losses, entry.inputs[0].id in roles)
        elif isinstance(op, Streaming) and op.function.startswith("max_pool2d_with_indices"):
            yield _with_offsets(entry, op)
        elif isinstance(op, Conv):
            last = op.channels_last or (channels_last and len(op.kernel_size) == _IMAGE)
            yield replace(entry, op=replace(op, channels_last=last, bias=False))
            if op.bias and entry.phase == FORWARD and entry.outputs:  # is added in place, with what follows
                out = entry.outputs[0]
                bias = Streaming(
                    "pointwise", prod(out.shape), _bytes(out), _bytes(out), out.dtype, function=BIAS
                )
                yield replace(entry, op=bias, name="aten.add", inputs=(out,))
        else:
            yield entry
        roles.update((ref.id, op.category) for ref in entry.outputs)


def _with_offsets(entry: StepOp, op: Streaming) -> StepOp:
    """Pooling whose indices are offsets within the window, of a byte each."""
    sides = []
    for refs in (entry.inputs, entry.outputs):
        narrow = tuple(replace(ref, dtype="int8") if ref.dtype == "int64" else ref for ref in refs)
        sides.append((narrow, sum(map(_bytes, refs)) - sum(map(_bytes, narrow))))
    (inputs, read), (outputs, written) = sides
    op = replace(op, read_bytes=op.read_bytes - read, write_bytes=op.write_bytes - written)
    return replace(entry, op=op, inputs=inputs, outputs=outputs)


def _added(entry: StepOp, op: Streaming, strided: bool, given: bool) -> Iterator[StepOp]:
    """An operation that adds at indexed places: what makes the table, and the additions.

    Args:
        strided: What is added lies in memory otherwise than the table.
        given: An operation wrote the first input. A table that none wrote is full of zeros.
    """
    table = entry.outputs[0]
    from_nothing = "backward" in op.function
    grad = max(entry.inputs, key=_bytes) if from_nothing else entry.inputs[-1]
    tables = _CORNERS.get(op.function.split("_")[1], 1)
    elements = prod(grad.shape) * tables
    interpolated = "upsample" in op.function
    size = size_bytes("fp32" if interpolated else table.dtype)
    made = prod(table.shape) * size * tables
    # Several tables are read by who adds them up, beside the one that it reads as the result.
    source = entry.inputs[:1] if given and not from_nothing else ()
    read = made if source else made - made // tables
    clear = Streaming("pointwise", prod(table.shape), read, made, table.dtype)
    yield replace(entry, op=clear, name="aten.zeros", inputs=source, outputs=())
    rows = max((prod(ref.shape) for ref in entry.inputs if ref.dtype.startswith("int")), default=1)
    stores = entry.phase == FORWARD and not op.function.endswith("_add")  # most likely
    if interpolated:
        work = _SCATTERED_WORK if strided else _ADDED_WORK
    elif stores:
        work = 1.0
    elif elements >= _SHORT_ROW * rows:
        work = _ADDED_WORK
    elif elements >= _CONTENDED * prod(table.shape):
        work = _CONTENDED_WORK
    else:
        work = _NARROW_WORK if size_bytes(table.dtype) < size_bytes("fp32") else _SCATTERED_WORK
    added = replace(op, elements=elements, write_bytes=elements * size, kernels=1, flop_per_element=work)
    yield replace(entry, op=added)


def _in_autocast_type(step: Step) -> Iterable[StepOp]:
    """The operations with backward products in autocast's type, casts right after what made the operands."""
    narrow_type = step.settings.amp
    if not narrow_type:
        return step.ops
    ops: list[StepOp] = []
    producer: dict[int, int] = {}
    narrow: set[int] = set()
    #: By the operation they follow, and what they cast.
    casts: dict[int, dict[tuple[int, int], StepOp]] = {}
    fresh = 1 + max((ref.id for entry in step.ops for ref in (*entry.inputs, *entry.outputs)), default=0)

    def cast(ref: TensorRef, index: int) -> TensorRef:
        nonlocal fresh
        writer = producer.get(ref.id, -1)
        source = step.ops[writer] if writer >= 0 else step.ops[index]
        after = casts.setdefault(writer if writer >= 0 else index - 1, {})
        if (writer, ref.id) not in after:
            elements = prod(ref.shape)
            copy = Streaming("copy", elements, 4 * elements, 2 * elements, "fp32", function="_to_copy")
            made = replace(ref, id=fresh, dtype=narrow_type)
            after[writer, ref.id] = StepOp(copy, source.phase, source.site, "aten._to_copy", (ref,), (made,))
            fresh += 1
        return after[writer, ref.id].outputs[0]

    for index, entry in enumerate(step.ops):
        inputs = tuple(replace(ref, dtype=narrow_type) if ref.id in narrow else ref for ref in entry.inputs)
        narrow.difference_update(ref.id for ref in entry.outputs)
        op = entry.op
        if isinstance(op, Gemm) and entry.phase.startswith("backward") and op.dtype in ("fp32", "tf32"):
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
    if not convs or len(forward) >= _FEW_CONVOLUTIONS * len(convs):
        return False
    channels = [(conv.group_channels[0], conv.out_channels) for conv in convs]
    grouped = any(conv.groups > 1 and not conv.is_depthwise for conv in convs)
    narrowing = any(
        2 * wide_out <= wide_in and conv.kernel_size[0] > 1
        for conv, (wide_in, wide_out) in zip(convs, channels, strict=True)
    )
    return not grouped and not narrowing and max(map(max, channels)) > _SMALL_CHANNELS


@dataclass(frozen=True, slots=True)
class _Pad:
    """A padded copy of an operand, in elements; the operand is None where it is not known."""

    operand: _Value | None
    before: int
    after: int
    dtype: str


def _padding(entry: StepOp, sources: tuple[tuple[TensorRef, int], ...]) -> tuple[Op, list[_Pad]]:
    """A misaligned product as padding makes it: the larger product, and a copy of each operand that grows.
    Any other operation as it is."""
    gemm = entry.op
    if not isinstance(gemm, Gemm) or gemm.dtype in ("fp32", "fp64") or gemm.intensity < _PADDED_INTENSITY:
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
    operands = [(prod(ref.shape), (writer, ref.id)) for ref, writer in sources]
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


def _padded(
    entry: StepOp, sources: tuple[tuple[TensorRef, int], ...], copies: set[tuple[_Value, int]]
) -> Iterator[StepOp]:
    """An operation behind the copies that pad its operands; the two products of a gradient share its copy."""
    op, pads = _padding(entry, sources)
    for pad in pads:
        if pad.operand is None or (pad.operand, pad.after) not in copies:
            size = size_bytes(pad.dtype)
            copy = Streaming("copy", pad.after, pad.before * size, pad.after * size, pad.dtype)
            yield replace(entry, op=copy, name=PAD, inputs=(), outputs=())
        if pad.operand is not None:
            copies.add((pad.operand, pad.after))
    yield replace(entry, op=op)
