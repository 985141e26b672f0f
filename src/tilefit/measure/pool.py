"""Random memory to cut operands from, so that no measurement allocates, waits or reads zeros."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tilefit.capture.dtypes import DTYPES
from tilefit.errors import TilefitError

#: PyTorch draws no random numbers of these.
_NOT_DRAWN = (torch.uint16, torch.uint32, torch.uint64)
#: The torch type that stores each of the project's element types; of two, the first.
TORCH_DTYPES = {
    name: dtype
    for dtype, name in reversed(DTYPES.items())
    if not dtype.is_complex and dtype not in _NOT_DRAWN
} | {"tf32": torch.float32}

# Tensors of PyTorch's own CUDA allocator start at multiples of 512 bytes; ours do too.
_ALIGNMENT_BYTES = 512
_FILL_ELEMENTS = 1 << 27


class Pool:
    """A ring of random memory for each element type.

    :meth:`take` hands out the next piece of the ring. A ring several times the L2 cache therefore
    yields operands that are cold in L2, and one operand that is used twice is warm the second time.
    Floating-point data is normal (mean 0, standard deviation 1), integers are uniform; zeros would
    draw less power and run faster than real data.

    Args:
        device: Where the memory lies.
        capacity_bytes: Size of each ring.
        seed: Of the random numbers.
    """

    def __init__(self, device: torch.device, capacity_bytes: int, seed: int = 0) -> None:
        self.device = device
        self.capacity_bytes = capacity_bytes
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(seed)
        self._rings: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self._next: dict[tuple[torch.dtype, bool], int] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of random data.

        Raises:
            TilefitError: it is larger than the ring.
        """
        return self._cut(shape, dtype, filled=True)

    def blank(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of unspecified content, for results."""
        return self._cut(shape, dtype, filled=False)

    def indices(self, shape: Sequence[int], high: int) -> torch.Tensor:
        """Uniform ``int64`` indices in ``[0, high)``; freshly allocated."""
        return torch.randint(high, tuple(shape), generator=self.generator, device=self.device)

    def _cut(self, shape: Sequence[int], dtype: torch.dtype, *, filled: bool) -> torch.Tensor:
        key = (dtype, filled)
        if key not in self._rings:
            self._rings[key] = self._ring(dtype, filled=filled)
            self._next[key] = 0
        ring, start, count = self._rings[key], self._next[key], prod(shape)
        if count > ring.numel():
            raise TilefitError(
                f"an operand of {count * dtype.itemsize} bytes exceeds the pool of {self.capacity_bytes}"
            )
        if start + count > ring.numel():
            start = 0
        step = _ALIGNMENT_BYTES // dtype.itemsize
        self._next[key] = start + -(-count // step) * step
        return ring[start : start + count].view(*shape)

    def _ring(self, dtype: torch.dtype, *, filled: bool) -> torch.Tensor:
        ring = torch.empty(self.capacity_bytes // dtype.itemsize, dtype=dtype, device=self.device)
        if not filled:
            return ring
        for start in range(0, ring.numel(), _FILL_ELEMENTS):
            part = ring[start : start + _FILL_ELEMENTS]
            if dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                part.normal_(generator=self.generator)
            elif dtype.is_floating_point:
                part.copy_(torch.randn(part.numel(), generator=self.generator, device=self.device))
            elif dtype is torch.bool:
                part.random_(0, 2, generator=self.generator)
            elif dtype is torch.uint8:
                part.random_(0, 256, generator=self.generator)
            else:
                part.random_(-128, 128, generator=self.generator)
        return ring
