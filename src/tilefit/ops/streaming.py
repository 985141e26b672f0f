"""Operations that stream memory: everything that does not multiply matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from tilefit.errors import UsageError
from tilefit.ops.base import OPTIMIZER, Growth, Op

#: What a streaming operation is, in the words of the reports. ``other`` is an operation the model
#: has no knowledge of beyond its bytes; coverage counts it.
ROLES = (
    "pointwise",
    "reduction",
    "normalization",
    "softmax",
    "loss",
    "embedding",
    "indexing",
    "sort",
    "pooling",
    "copy",
    "optimizer",
    "collective",
    "other",
)

#: The function of a copy that PyTorch makes within another operation, whose kernel takes packed rows alone.
#: A compiler writes kernels that read any layout.
CONTIGUOUS = "contiguous"
#: The function of a concatenation of one tensor with empty ones, as of keys with a cache that holds none yet.
JOINED_ALONE = "cat_alone"


@dataclass(frozen=True, slots=True)
class Streaming(Op):
    """An operation whose time is the time to move its bytes.

    Attributes:
        role: What it is, one of :data:`ROLES`.
        elements: Elements of its largest operand.
        read_bytes, write_bytes: Bytes of its operands and results, each counted once.
        dtype: Element type of its largest operand.
        flop_per_element: Arithmetic per element (a few; it hardly ever matters).
        inner: Elements that are reduced or normalised together (0 where that runs across the contiguous
            dimension); of other operations, elements that are moved together, 0 where all of them are.
        strided: Operands and result do not lie in memory alike, so an access is not coalesced on one side;
            or what is normalised together does not lie together.
        kernels: GPU kernels it launches.
        function: The library's function that runs, by ATen's name without underscores around it
            (``native_layer_norm``, ``add``); empty where that is unknown, or several are fused into one.
        picked, table: Rows of ``inner`` elements that are looked up, written or added to by their numbers,
            and those of the table that they are in; 0 where it does nothing of the kind.
    """

    kind: ClassVar[str] = "streaming"
    multiplies: ClassVar[bool] = False
    stepwise: ClassVar[tuple[str, ...]] = ("kernels",)

    role: str
    elements: int
    read_bytes: int
    write_bytes: int
    dtype: str = "fp32"
    flop_per_element: float = 1.0
    inner: int = 0
    strided: bool = False
    kernels: int = 1
    function: str = ""
    picked: int = 0
    table: int = 0

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"unknown role {self.role!r}", hint=f"Use one of: {', '.join(ROLES)}.")
        Op.__post_init__(self)

    @property
    def flop(self) -> int:
        return int(self.elements * self.flop_per_element)

    @property
    def category(self) -> str:
        return self.role

    def on_batch(self, growth: Growth) -> Streaming:
        if growth.phase == OPTIMIZER:
            return self
        read = _more(self.read_bytes, growth.read_bytes, growth.factor)
        write = _more(self.write_bytes, growth.write_bytes, growth.factor)
        # What is normalised or reduced over the batch is more for each result, of which there are no more.
        over_batch = "batch_norm" in self.function or (self.role == "reduction" and write == 1.0)
        return replace(
            self,
            elements=growth.of(self.elements) if growth.grows else max(1, self.elements),
            inner=growth.of(self.inner) if growth.grows and over_batch and self.inner else self.inner,
            read_bytes=round(self.read_bytes * read),
            write_bytes=round(self.write_bytes * write),
            picked=growth.of(self.picked) if self.picked and growth.read_bytes[1] else self.picked,
        )

    def shared(self, share: float, kernels: float = 1.0) -> Streaming:
        return replace(
            self,
            elements=max(1, round(self.elements * share)),
            read_bytes=round(self.read_bytes * share),
            write_bytes=round(self.write_bytes * share),
            picked=round(self.picked * share),
            kernels=max(1, round(self.kernels * kernels)) if kernels != 1.0 else self.kernels,
        )

    @property
    def shape(self) -> str:
        return f"{self.elements}" + (f" by {self.inner}" if self.inner else "")


#: Tensors that one multi-tensor launch holds, by the number of tensor lists, its blocks, and the elements of
#: a block (PyTorch, ATen/native/cuda/MultiTensorApply.cuh: depth_to_max_tensors, depth_to_max_blocks, chunk).
_TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
_BLOCKS_PER_LAUNCH, _CHUNK_ELEMENTS = 320, 65536


def multi_tensor_launches(sizes: Iterable[int], lists: int = 4) -> int:
    """Kernels of an operation on several tensors at once.

    Args:
        sizes: Elements of each tensor of a list, in order.
        lists: Lists of such tensors; a fused Adam has four.
    """
    launches = tensors = blocks = 0
    for size in filter(None, sizes):
        chunks = -(-size // _CHUNK_ELEMENTS)
        full, blocks = divmod(blocks + chunks, _BLOCKS_PER_LAUNCH)
        launches += full
        # A tensor that is not done with the launch goes on in the next.
        tensors = tensors + 1 if not full else min(blocks, 1)
        if tensors == _TENSORS_PER_LAUNCH[lists - 1]:
            launches += 1
            tensors = blocks = 0
    return launches + bool(blocks)


def _more(moved: int, shares: tuple[int, int], factor: float) -> float:
    """How many times as much is moved, by the bytes of the operands that stay and that grow."""
    stay, grow = shares
    # An operation that moves less than its operands hold picks rows (an embedding): it scales as a whole.
    if stay + grow == 0 or moved < 0.99 * (stay + grow):
        return factor if moved else 1.0
    return (stay + grow * factor) / (stay + grow)
