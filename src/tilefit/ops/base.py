"""What every operation has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, Self

from tilefit.errors import UsageError
from tilefit.ops.dtypes import canonical

FORWARD = "forward"
BACKWARD_DATA = "backward-data"
BACKWARD_WEIGHT = "backward-weight"
OPTIMIZER = "optimizer"
#: Passes of an operation, and the phases of a training step, in the order in which they run.
DIRECTIONS = (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT)
PHASES = (*DIRECTIONS, OPTIMIZER)


class Growth(NamedTuple):
    """What an operation of a step is on another batch, beside its own sizes.

    Attributes:
        factor: Samples there over samples here.
        phase: Of the step.
        weights: Last two sizes of the parameters among its inputs.
        read_bytes, write_bytes: Of its operands and results, those that stay and those that grow.
        grows: Its largest operand does.
    """

    factor: float
    phase: str
    weights: tuple[tuple[int, ...], ...] = ()
    read_bytes: tuple[int, int] = (0, 0)
    write_bytes: tuple[int, int] = (0, 0)
    grows: bool = True

    def of(self, size: int) -> int:
        """That many times the factor."""
        return max(1, round(size * self.factor))


class Op(ABC):
    """One operation as the hardware sees it: immutable, hashable, free of any framework.

    Sizes are counted once per operand: what the operation must compute and must move, not what one
    implementation of it happens to do. A kind of operation is a frozen dataclass that derives from this.
    """

    __slots__ = ()

    #: The kinds there are, by their name.
    KINDS: ClassVar[dict[str, type[Op]]] = {}
    #: The name of the kind, as reports and files write it.
    kind: ClassVar[str]
    #: It multiplies matrices, so that Tensor Cores may run it; else it moves bytes.
    multiplies: ClassVar[bool] = True
    #: Fields that follow thresholds and not polynomials of the batch or another size.
    stepwise: ClassVar[tuple[str, ...]] = ()
    #: Element type of the operands (see :mod:`tilefit.ops.dtypes`).
    dtype: str

    #: Passes that it has; empty where it has none of its own.
    passes: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical(self.dtype))
        if self.passes and self.direction not in self.passes:  # type: ignore[attr-defined]
            raise UsageError(f"unknown direction {self.direction!r}")  # type: ignore[attr-defined]

    def __init_subclass__(cls) -> None:
        # A dataclass with slots is made twice: the second one stays.
        cls.KINDS[cls.kind] = cls

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

    @abstractmethod
    def on_batch(self, growth: Growth) -> Self:
        """The operation with other samples."""

    def shared(self, share: float, kernels: float = 1.0) -> Self:
        """A share of its elements, in a share of its kernels; all of it where it cannot be divided so."""
        return self

    @property
    def category(self) -> str:
        """What it is, in the words of the reports; finer than the kind where that does many things."""
        return self.kind

    @property
    def kernels(self) -> int:
        """GPU kernels that it launches, where no library chooses otherwise."""
        return 1

    @property
    def moved_bytes(self) -> int:
        """Compulsory bytes, read and written."""
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: floating-point operations per compulsory byte."""
        moved = self.moved_bytes
        return self.flop / moved if moved else 0.0

    @property
    def values(self) -> list[Any]:
        """The values of its fields, from which :meth:`of` makes it again."""
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    @classmethod
    def of(cls, kind: str, values: Sequence[Any]) -> Op:
        """The operation of a kind with these values of its fields, lists for tuples as JSON has them.

        Raises:
            KeyError: no kind has this name.
        """
        return cls.KINDS[kind](*(tuple(value) if isinstance(value, list) else value for value in values))
