"""Matrix multiplication."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from tilefit.errors import UsageError
from tilefit.ops.base import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Growth, Op
from tilefit.ops.dtypes import alignment_bytes, canonical, size_bytes

LAYOUTS = ("NN", "TN", "NT", "TT")


class Operand(NamedTuple):
    """One matrix of a product as it lies in memory."""

    name: str
    #: Which of m, n, k is the contiguous dimension.
    contiguous: str
    #: Distance between consecutive rows (or columns), in elements.
    leading_dimension: int
    dtype: str

    @property
    def alignment_bytes(self) -> int:
        """Largest power of two, at most a line of 128, that divides that distance in bytes."""
        return alignment_bytes(self.leading_dimension, self.dtype)


@dataclass(frozen=True, slots=True)
class Gemm(Op):
    """``C[m, n] = A[m, k] @ B[k, n]``, ``batch`` times, in PyTorch's row-major terms.

    Attributes:
        m, n, k: Rows of C, columns of C, contraction.
        dtype: Element type of A and B. ``"tf32"`` is fp32 storage multiplied in TF32.
        layout: The letters cuBLAS sees (column-major): the first is B's, the second A's. A row-major
            operand is ``N``, a transposed view ``T``. ``F.linear`` runs ``TN`` forward, ``NN`` for
            its data gradient and ``NT`` for its weight gradient.
        batch: Independent products (``bmm``).
        out_dtype: Element type of C; that of A and B when empty.
        ld_a, ld_b: Leading dimensions in elements where an operand is a slice of a larger matrix;
            0 means tightly packed.
        bias: A bias is added in the epilogue.
        same_b: All products multiply the same B, as linear layers do with transposed inputs where no gradient
            is asked for (``should_fold`` in ATen/native/LinearAlgebra.cpp).
    """

    kind: ClassVar[str] = "gemm"

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    layout: str = "TN"
    batch: int = 1
    out_dtype: str = ""
    ld_a: int = 0
    ld_b: int = 0
    bias: bool = False
    same_b: bool = False

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.layout not in LAYOUTS:
            raise UsageError(
                f"unknown layout {self.layout!r}", hint=f"Use the BLAS letters: one of {', '.join(LAYOUTS)}."
            )
        Op.__post_init__(self)
        object.__setattr__(self, "out_dtype", canonical(self.out_dtype) if self.out_dtype else "")

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """A, B and C with the dimension that is contiguous in each."""
        letter_b, letter_a = self.layout[0], self.layout[1]
        a = ("k", self.k) if letter_a == "N" else ("m", self.m)
        b = ("n", self.n) if letter_b == "N" else ("k", self.k)
        return (
            Operand("A", a[0], self.ld_a or a[1], self.dtype),
            Operand("B", b[0], self.ld_b or b[1], self.dtype),
            Operand("C", "n", self.n, self.out_dtype or self.dtype),
        )

    @property
    def matrices(self) -> int:
        """Different B."""
        return 1 if self.same_b else self.batch

    @property
    def flop(self) -> int:
        """A multiply-add of complex numbers is four of real ones."""
        parts = 4 if self.dtype.startswith("complex") else 1
        return 2 * self.m * self.n * self.k * self.batch * parts

    @property
    def read_bytes(self) -> int:
        return (self.batch * self.m + self.matrices * self.n) * self.k * size_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.batch * self.m * self.n * size_bytes(self.out_dtype or self.dtype)

    @property
    def shape(self) -> str:
        sizes = f"{self.m}x{self.n}x{self.k}"
        return f"{self.batch} of {sizes}" if self.batch > 1 else sizes

    def on_batch(self, growth: Growth) -> Gemm:
        # Only the dimension that counts rows grows.
        rows = self._rows(growth)
        return replace(self, **{rows: growth.of(getattr(self, rows))})  # type: ignore[arg-type]

    def _rows(self, growth: Growth) -> str:
        """The dimension that counts samples."""
        if growth.phase == BACKWARD_WEIGHT:
            return "k"
        for weight in growth.weights:
            if {*weight} == {self.k, self.n}:
                return "m"
            if {*weight} == {self.m, self.k}:
                return "n"
        return "batch"


def linear_pass(direction: str, rows: int, out_features: int, in_features: int, dtype: str) -> Gemm:
    """The product of a pass of ``F.linear`` on rows of features."""
    if direction == FORWARD:
        return Gemm(rows, out_features, in_features, dtype, "TN")
    if direction == BACKWARD_DATA:
        return Gemm(rows, in_features, out_features, dtype, "NN")
    return Gemm(out_features, in_features, rows, dtype, "NT")
