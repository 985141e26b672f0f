"""What every operation has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

FORWARD = "forward"
BACKWARD_DATA = "backward-data"
BACKWARD_WEIGHT = "backward-weight"
OPTIMIZER = "optimizer"
#: The phases of a training step, in the order in which they run.
PHASES = (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT, OPTIMIZER)


class Op(ABC):
    """One operation as the hardware sees it: immutable, hashable, free of any framework.

    Sizes are counted once per operand: what the operation must compute and must move, not what one
    implementation of it happens to do.
    """

    __slots__ = ()

    #: The name of the kind, as reports and files write it.
    kind: ClassVar[str]
    #: Element type of the operands (see :mod:`tilefit.ops.dtypes`).
    dtype: str

    @property
    @abstractmethod
    def flop(self) -> int:
        """Floating-point operations; a multiply-add counts as two."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Compulsory bytes read from memory."""

    @property
    @abstractmethod
    def write_bytes(self) -> int:
        """Compulsory bytes written to memory."""

    @property
    @abstractmethod
    def shape(self) -> str:
        """The sizes as a person writes them, such as ``16384x768x50257``."""

    @property
    def moved_bytes(self) -> int:
        """Compulsory bytes, read and written."""
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: floating-point operations per compulsory byte."""
        moved = self.moved_bytes
        return self.flop / moved if moved else 0.0
