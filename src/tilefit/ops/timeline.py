"""The memory of a step over time: every piece of it, whose it is, when it is made and when it is freed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilefit.ops.base import FORWARD
from tilefit.ops.entries import StepOp, TensorRef

#: Whose memory is.
PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
BUFFERS, INPUTS, CASTS = "buffers", "inputs", "casts of parameters"
ACTIVATIONS, LOGITS, WORK = "activations", "logits and loss", "working space"
OWNERS = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, BUFFERS, INPUTS, CASTS, ACTIVATIONS, LOGITS, WORK)

#: What the loss of a classification reads is its logits.
_LOSSES = ("aten._log_softmax", "aten.nll_loss", "aten.cross_entropy", "aten._softmax_cross_entropy")


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of memory: the storage of a tensor and its views.

    Attributes:
        size_bytes: Of the storage, before the allocator rounds it.
        owner: One of :data:`OWNERS`.
        module: Path of the module that made it; empty outside of any.
        grows: Its size follows the batch.
    """

    size_bytes: int
    owner: str
    module: str = ""
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What is alive at a moment.

    Attributes:
        op: The number of the operation that runs, or ran last.
        owners: Bytes by owner, those with none left out.
        blocks: Numbers of what is alive.
    """

    op: int
    owners: Mapping[str, int]
    blocks: frozenset[int] = frozenset()

    @property
    def total_bytes(self) -> int:
        return sum(self.owners.values())


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is alive when. Nothing is known of a step whose timeline is empty.

    Attributes:
        blocks: By their numbers, which are those of :class:`~tilefit.ops.TensorRef`.
        events: Block and operation, in order: the first of a block makes it, the second frees it. The number
            is that of the operation that is about to be launched then.
    """

    blocks: Mapping[int, Block] = field(default_factory=dict)
    events: tuple[tuple[int, int], ...] = ()

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """Block, operation, and the bytes it adds, below zero where it is freed."""
        alive: set[int] = set()
        for number, op in self.events:
            size = self.blocks[number].size_bytes
            yield number, op, -size if number in alive else size
            alive ^= {number}

    def peak(self) -> Held:
        """The fullest moment; the first of several."""
        live = most = at = 0
        for index, (_, _, size) in enumerate(self.changes()):
            live += size
            if live > most:
                most, at = live, index
        return self._held(at)

    def _held(self, at: int) -> Held:
        alive: set[int] = set()
        for number, _ in self.events[: at + 1]:
            alive ^= {number}
        return Held(self.events[at][1] if self.events else 0, self._owned(alive), frozenset(alive))

    def _owned(self, numbers: Iterable[int]) -> dict[str, int]:
        owned = dict.fromkeys(OWNERS, 0)
        for number in numbers:
            owned[self.blocks[number].owner] += self.blocks[number].size_bytes
        return {owner: size for owner, size in owned.items() if size}

    def modules(self, numbers: Iterable[int]) -> dict[str, int]:
        """Bytes of activations among blocks by the module that made them, the most first."""
        of: dict[str, int] = {}
        for block in map(self.blocks.__getitem__, numbers):
            if block.owner == ACTIVATIONS:
                of[block.module] = of.get(block.module, 0) + block.size_bytes
        return dict(sorted(of.items(), key=lambda pair: -pair[1]))

    def moments(self, most: int) -> tuple[Held, ...]:
        """The fullest moment of each of up to ``most`` equal parts of the step, in order; without blocks."""
        last = max((op for _, op in self.events), default=0)
        width = last // most + 1
        fullest: dict[int, Held] = {}
        owned, total = dict.fromkeys(OWNERS, 0), 0
        best: dict[int, int] = {}
        for number, op, size in self.changes():
            owned[self.blocks[number].owner] += size
            total += size
            if total > best.get(op // width, -1):
                best[op // width] = total
                fullest[op // width] = Held(op, {owner: size for owner, size in owned.items() if size})
        return tuple(fullest[part] for part in sorted(fullest))

    def on_batch(self, factor: float) -> Timeline:
        """The same with ``factor`` times the samples."""
        return replace(
            self,
            blocks={
                number: Block(round(block.size_bytes * factor), block.owner, block.module, True)
                if block.grows
                else block
                for number, block in self.blocks.items()
            },
        )


def logits(ops: Sequence[StepOp]) -> set[int]:
    """Numbers of what holds logits or is made of them for the loss: what the loss of a classification reads,
    back to the product that makes it, what it makes, and their gradients."""
    made: dict[int, StepOp] = {}
    found: set[int] = set()
    sizes: set[int] = set()
    for entry in ops:
        if entry.phase == FORWARD and not entry.recomputed:
            for ref in entry.outputs:
                made.setdefault(ref.id, entry)
            if entry.name.startswith(_LOSSES):
                chain = [*_chain(entry.inputs[:1], made), *entry.outputs]
                found.update(ref.id for ref in chain)
                sizes.update(ref.elements for ref in chain if len(ref.shape) > 1)
        elif sizes:
            found.update(ref.id for ref in entry.outputs if len(ref.shape) > 1 and ref.elements in sizes)
    return found


def _chain(refs: Sequence[TensorRef], made: Mapping[int, StepOp]) -> list[TensorRef]:
    """A tensor and those it is made of, up to a product."""
    chain: dict[int, TensorRef] = {}
    waiting = list(refs)
    while waiting:
        ref = waiting.pop()
        maker = made.get(ref.id)
        if ref.id in chain or maker is None:
            continue
        chain[ref.id] = ref
        if not maker.op.multiplies:
            waiting += [each for each in maker.inputs if each.elements >= ref.elements]
    return list(chain.values())


def owned(
    ops: Sequence[StepOp],
    sizes: Mapping[int, int],
    freed: Collection[int],
    known: Mapping[int, str],
    saved: Collection[int],
    stay: Collection[int],
) -> dict[int, Block]:
    """Whose each piece of memory is.

    Args:
        ops: The step's.
        sizes: Bytes of each piece by its number; ``freed``: those that do not outlive the step.
        known: The owner of those that are no operation's.
        saved: Numbers of what is alive when a backward pass begins.
        stay: Numbers of what does not grow with the batch.
    """
    maker: dict[int, str] = {}
    casts: set[int] = set()
    saved = {*saved, *(ref.id for entry in ops if entry.recomputed for ref in entry.outputs)}
    for entry in ops:
        casts.update(ref.id for ref in entry.inputs if ref.parameter)
        for ref in entry.outputs:
            maker.setdefault(ref.id, entry.site.module)
    of_loss = logits(ops)

    def owner(number: int) -> str:
        if number in known:
            return known[number]
        if number not in maker:
            return WORK if number in freed else INPUTS
        if number in casts:
            return CASTS
        if number in of_loss:
            return LOGITS
        return ACTIVATIONS if number in saved else WORK

    return {
        number: Block(size, owner(number), maker.get(number, ""), number not in stay)
        for number, size in sizes.items()
    }
