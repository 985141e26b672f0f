"""What tensors of a step a rank holds, and for how long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy

from tilefit.ops import BACKWARD_WEIGHT, FORWARD, OPTIMIZER, Collective, Gemm, StepOp


class Lifetimes:
    """The tensors of a step on one rank, but for parameters and their gradients.

    Args:
        entries: Its operations.
        parameters: Shapes of parameters: what has one in the backward pass is a gradient.
        parts: Of each operation that tensor-parallel ranks share along the sequence, how many do.
        gathers_again: What they gather for products is gathered again in the backward pass, not kept.
    """

    def __init__(
        self,
        entries: Sequence[StepOp],
        parameters: Collection[tuple[int, ...]],
        parts: dict[int, int],
        gathers_again: bool,
    ) -> None:
        self._entries = entries
        #: Bytes, the operation that made it last in a pass, and the last one that reads it, by tensor.
        self._bytes: dict[int, int] = {}
        self._maker: dict[int, int] = {}
        self._reader: dict[int, int] = {}
        multiplied = {ref.id for each in entries if isinstance(each.op, Gemm) for ref in each.inputs}
        for index, entry in enumerate(entries):
            if entry.phase == OPTIMIZER:
                continue
            self._reader |= {ref.id: index for ref in entry.inputs if not ref.parameter}
            if isinstance(entry.op, Collective):
                continue
            for ref in entry.outputs:
                if entry.phase == FORWARD or ref.shape not in parameters:
                    whole = ref.id in multiplied and not gathers_again
                    size = ref.bytes // (1 if whole else parts.get(index, 1))
                    self._bytes[ref.id] = max(size, self._bytes.get(ref.id, 0))
                    # What a backward pass changes in place, the forward pass has made.
                    if self._is_backward(self._maker.get(ref.id, index)) or not self._is_backward(index):
                        self._maker[ref.id] = index

    def _is_backward(self, index: int) -> bool:
        return index >= 0 and self._entries[index].phase != FORWARD

    def kept(self, members: Collection[int]) -> dict[int, int]:
        """Bytes of what these operations make in the forward pass and the backward pass reads, by tensor."""
        own = set(members)
        return {
            tensor: self._bytes[tensor]
            for tensor, maker in self._maker.items()
            if maker in own
            and not self._is_backward(maker)
            and self._is_backward(self._reader.get(tensor, -1))
        }

    def without_logits(self, members: Collection[int]) -> Lifetimes:
        """As if tensors as large as the largest product of these operations, the logits, took no memory."""
        own = [self._entries[index] for index in members]
        least = max(
            (ref.elements for each in own if isinstance(each.op, Gemm) for ref in each.outputs[:1]),
            default=0,
        )
        wide = {ref.id for each in own for ref in each.outputs if ref.elements >= least}
        other = copy(self)
        other._bytes = {tensor: 0 if tensor in wide else size for tensor, size in self._bytes.items()}
        return other

    def late(self, members: Collection[int]) -> int:
        """Bytes of the gradients that products for weights read, which wait for those that are put off."""
        read = {
            ref.id
            for index in members
            if self._entries[index].phase == BACKWARD_WEIGHT
            for ref in self._entries[index].inputs
        }
        return sum(
            self._bytes[each] for each in read & self._bytes.keys() if self._is_backward(self._maker[each])
        )

    def surplus(self, members: Collection[int]) -> int:
        """Bytes that their two passes hold at their fullest moment beyond what they keep.

        In the backward pass what was kept goes when it has been read; what follows them has handed them
        gradients.
        """
        forward, backward = ([i for i in members if self._is_backward(i) == way] for way in (False, True))
        kept, first = self.kept(members), min(backward, default=0)
        alive = {tensor: size for tensor, size in kept.items() if self._reader[tensor] >= first}
        alive |= {
            ref.id: self._bytes[ref.id]
            for index in backward
            for ref in self._entries[index].inputs
            if self._is_backward(self._maker.get(ref.id, -1)) and self._maker[ref.id] < first
        }
        most = max(self._most(forward, {}), self._most(backward, alive))
        return max(0, most - sum(kept.values()))

    def _most(self, members: Collection[int], alive: dict[int, int]) -> int:
        """What operations hold at most that begin with some tensors; a sum of tensor-parallel ranks is
        written beside what is summed up."""
        most = sum(alive.values())
        for index in members:
            entry = self._entries[index]
            alive |= {ref.id: self._bytes[ref.id] for ref in entry.outputs if ref.id in self._bytes}
            summed = isinstance(entry.op, Collective) * sum(ref.bytes for ref in entry.outputs)
            most = max(most, sum(alive.values()) + summed)
            for ref in (*entry.inputs, *entry.outputs):
                if self._reader.get(ref.id, -1) <= index:
                    alive.pop(ref.id, None)
        return most
