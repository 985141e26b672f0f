"""Communication between GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tilefit.errors import UsageError
from tilefit.ops.base import OPTIMIZER, Growth, Op
from tilefit.ops.dtypes import size_bytes

ALL_REDUCE, ALL_GATHER, SEND = "all-reduce", "all-gather", "send"
REDUCE_SCATTER, ALL_TO_ALL = "reduce-scatter", "all-to-all"
FUNCTIONS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND)


def ring_bytes(function: str, size_bytes: float, ranks: int) -> float:
    """Bytes that one GPU must send at least for a tensor of that size.

    An all-reduce sends each byte ``2 (p - 1) / p`` times over p ranks, the others, but for one GPU that sends
    to the next, ``(p - 1) / p`` times; a ring reaches both (Patarasuk and Yuan, "Bandwidth Optimal All-reduce
    Algorithms for Clusters of Workstations", 2009).
    """
    passes = {ALL_REDUCE: 2.0, SEND: ranks / (ranks - 1)}.get(function, 1.0)
    return passes * (ranks - 1) / ranks * size_bytes


@dataclass(frozen=True, slots=True)
class Collective(Op):
    """A transfer that several GPUs take part in, as one of them sees it.

    Attributes:
        function: ``all-reduce`` (each has a tensor and gets the sum), ``all-gather`` (each has a part and
            gets all of it), ``reduce-scatter`` (each has a tensor and gets a part of the sum), ``all-to-all``
            (each sends a part to each) or ``send`` (one hands a tensor to the next).
        elements: Elements of the tensor; of an all-gather, of all parts together.
        ranks: GPUs that take part.
        dtype: Element type.
    """

    kind: ClassVar[str] = "collective"
    multiplies: ClassVar[bool] = False

    function: str
    elements: int
    ranks: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise UsageError(f"unknown collective {self.function!r}")
        if self.ranks < 2:
            raise UsageError(f"a collective needs at least two ranks, not {self.ranks}")
        Op.__post_init__(self)

    @property
    def flop(self) -> int:
        return 0

    @property
    def read_bytes(self) -> int:
        held = self.elements // self.ranks if self.function == ALL_GATHER else self.elements
        return held * size_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        if self.function == SEND:
            return 0
        held = self.elements // self.ranks if self.function == REDUCE_SCATTER else self.elements
        return held * size_bytes(self.dtype)

    @property
    def link_bytes(self) -> float:
        """Bytes that one GPU must send at least: see :func:`ring_bytes`."""
        return ring_bytes(self.function, self.elements * size_bytes(self.dtype), self.ranks)

    def on_batch(self, growth: Growth) -> Collective:
        return self if growth.phase == OPTIMIZER else replace(self, elements=growth.of(self.elements))

    @property
    def shape(self) -> str:
        return f"{self.function} of {self.elements} over {self.ranks}"
