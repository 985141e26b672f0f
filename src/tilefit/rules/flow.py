"""Which operation wrote what another reads, and which gradients belong to which call of a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from tilefit.ops import Step, StepOp, Streaming, TensorRef
from tilefit.ops.dtypes import FLOATS
from tilefit.rules.layers import Linear, linears


class Flow:
    """The data flow of a step.

    Attributes:
        writers: By operation: for each tensor it reads, by id, the operation that wrote it last.
        readers: By operation: the later operations that read what it wrote, in order.
        returned: Numbers of the memory that the caller reads.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.returned = frozenset(step.returned)
        self.writers: list[dict[int, int]] = []
        self.readers: list[list[int]] = [[] for _ in step.ops]
        last: dict[int, int] = {}
        for index, entry in enumerate(step.ops):
            writers = {ref.id: last[ref.id] for ref in entry.inputs if ref.id in last}
            self.writers.append(writers)
            for writer in dict.fromkeys(writers.values()):
                self.readers[writer].append(index)
            last.update((ref.id, index) for ref in entry.outputs)

    def reachable(self, starts: Iterable[int], keep: Callable[[int], bool]) -> set[int]:
        """Operations that depend on ``starts`` through operations that ``keep`` accepts, without them."""
        return self._walk(starts, keep, lambda index: self.readers[index])

    def needed(self, starts: Iterable[int], keep: Callable[[int], bool]) -> set[int]:
        """Operations that ``starts`` depend on through operations that ``keep`` accepts, without them."""
        return self._walk(starts, keep, lambda index: self.writers[index].values())

    def before(self, index: int) -> int | None:
        """The operation that wrote what an operation works on: its largest operand."""
        operand = activation(self.step.ops[index])
        return self.writers[index].get(operand.id) if operand else None

    def operand(self, index: int) -> tuple[int, int, int | None] | None:
        """What an operation works on, its largest operand before any casts: the number of its memory, where
        in it, and the operation that wrote it."""
        ref, at = activation(self.step.ops[index]), index
        while ref is not None:
            writer = self.writers[at].get(ref.id)
            if writer is None or not is_cast(self.step.ops[writer]):
                return ref.id, ref.offset, writer
            (ref,), at = self.step.ops[writer].inputs, writer
        return None

    def after(self, index: int, phase: str = "", but: Collection[int] = ()) -> int | None:
        """The only reader, of a phase if one is given, of what an operation wrote; ``but`` some."""
        if not self.returned.isdisjoint(ref.id for ref in self.step.ops[index].outputs):
            return None
        readers = [i for i in self.readers[index] if phase in ("", self.step.ops[i].phase) and i not in but]
        return readers[0] if len(readers) == 1 else None

    def way(
        self,
        start: int,
        follow: Callable[[int], int | None],
        ends: Callable[[StepOp], bool],
        passes: Callable[[StepOp], bool],
        most: float = inf,
    ) -> list[int] | None:
        """The operations from one on, without it, to the first at which it ``ends``; None if anything that it
        does not pass through comes before that, or more than ``most``."""
        found: list[int] = []
        at = follow(start)
        while at is not None and len(found) < most:
            found.append(at)
            if ends(self.step.ops[at]):
                return found
            if not passes(self.step.ops[at]):
                return None
            at = follow(at)
        return None

    def _walk(
        self, starts: Iterable[int], keep: Callable[[int], bool], next_: Callable[[int], Iterable[int]]
    ) -> set[int]:
        seen: set[int] = set()
        todo = list(starts)
        while todo:
            for index in next_(todo.pop()):
                if index not in seen and keep(index):
                    seen.add(index)
                    todo.append(index)
        return seen


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call of a linear layer: its product and the two gradients, as indices into ``Step.ops``."""

    layer: Linear
    forward: int
    backward_data: int | None
    backward_weight: int | None


def linear_calls(step: Step) -> list[LinearCall]:
    """Every call of every linear layer, in order of the forward products.

    A weight gradient belongs to the call whose input it reads, a data gradient to the weight gradient
    that reads the same output gradient; where several do (slices of one tensor), the last call's come
    first. A recomputed call owns the gradients; the first one has none.
    """
    calls = []
    taken: set[int] = set()
    for layer in linears(step):
        data_by_gradient = _by_operand(step, layer.backward_data)
        weight_by_input = _by_operand(step, layer.backward_weight)
        for forward in sorted(layer.forward, key=lambda index: not step.ops[index].recomputed):
            data = None
            weight = _take(weight_by_input, taken, step.ops[forward])
            if weight is not None:
                data = _take(data_by_gradient, taken, step.ops[weight])
            elif len(layer.forward) == len(layer.backward_data) == 1:
                data = layer.backward_data[0]
            calls.append(LinearCall(layer, forward, data, weight))
    return sorted(calls, key=lambda call: call.forward)


def _by_operand(step: Step, indices: list[int]) -> dict[int, list[int]]:
    """Operations by the tensors, not parameters, that they read."""
    by_operand: dict[int, list[int]] = defaultdict(list)
    for index in indices:
        for number in {ref.id for ref in step.ops[index].inputs if not ref.parameter}:
            by_operand[number].append(index)
    return by_operand


def _take(by_operand: dict[int, list[int]], taken: set[int], entry: StepOp) -> int | None:
    """The last operation not taken that shares an operand with ``entry``."""
    for ref in entry.inputs:
        candidates = [] if ref.parameter else by_operand.get(ref.id, [])
        while candidates:
            index = candidates.pop()
            if index not in taken:
                taken.add(index)
                return index
    return None


def activation(entry: StepOp) -> TensorRef | None:
    """The largest operand of an operation that is not a parameter."""
    refs = [ref for ref in entry.inputs if not ref.parameter]
    return max(refs, key=lambda ref: ref.elements, default=None)


def is_cast(entry: StepOp) -> bool:
    """A copy of one floating-point tensor in another element type."""
    if entry.op.category != "copy" or len(entry.inputs) != 1 or len(entry.outputs) != 1:
        return False
    types = {entry.inputs[0].dtype, entry.outputs[0].dtype}
    return len(types) == 2 and types <= set(FLOATS)


def is_add(entry: StepOp) -> bool:
    """A sum of two tensors, as autograd makes where two gradients meet."""
    return isinstance(entry.op, Streaming) and entry.name.rstrip("_") == "aten.add" and len(entry.inputs) >= 2


def tensor_bytes(refs: Iterable[TensorRef]) -> int:
    """Bytes of tensors, each memory counted once."""
    return sum(ref.bytes for ref in distinct(refs))


def distinct(refs: Iterable[TensorRef]) -> tuple[TensorRef, ...]:
    """Tensors, each memory once."""
    return tuple({ref.id: ref for ref in refs}.values())


def read_from_outside(entries: Sequence[StepOp]) -> tuple[TensorRef, ...]:
    """What operations read that none of them makes."""
    made = {ref.id for entry in entries for ref in entry.outputs}
    return distinct(ref for entry in entries for ref in entry.inputs if ref.id not in made)


def parent(module: str) -> str:
    """The path of the module that holds a module."""
    return module.rpartition(".")[0]


def copy_op(source: TensorRef, result: TensorRef) -> Streaming:
    """The operation that copies (and casts) one tensor into another."""
    return Streaming("copy", source.elements, source.bytes, result.bytes, source.dtype)


def bias_gradient(flow: Flow, call: LinearCall) -> int | None:
    """The sum over rows that makes the gradient of a call's bias."""
    if call.backward_weight is None:
        return None
    step, weight = flow.step, call.backward_weight
    inputs = {ref.id for ref in step.ops[call.forward].inputs}
    sums = [
        index
        for number, writer in flow.writers[weight].items()
        if number not in inputs
        for index in flow.readers[writer]
        if step.ops[index].name == "aten.sum" and step.ops[index].site.module == call.layer.module
    ]
    # Output gradients that are slices of one tensor look alike: the sum is run next to the product.
    return min(sums, key=lambda index: abs(index - weight), default=None)
