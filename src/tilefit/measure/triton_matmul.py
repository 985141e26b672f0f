"""Plain matrix products in Triton with a few tile sizes: alternatives to hold the library against.

- :func:`matmul`: a tile of the result per block, as a user writes it in an afternoon.
- :func:`split_k`: for few rows. The contraction of a tile is split over several blocks, so that all
  multiprocessors read the weight; the last block of a tile to finish adds up the parts, in their order.

Needs Triton, which comes with PyTorch's CUDA builds.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Rows and columns of a tile, depth, pipeline stages, warps.
Configuration = tuple[int, int, int, int, int]
#: By the most rows of C they are meant for.
_CONFIGURATIONS: dict[int, tuple[Configuration, ...]] = {
    16: ((16, 16, 256, 4, 2), (16, 32, 256, 4, 4), (16, 64, 128, 4, 4)),
    32: ((16, 32, 256, 4, 4), (32, 32, 128, 4, 4), (32, 64, 128, 4, 4)),
    64: ((32, 64, 128, 4, 4), (64, 32, 128, 4, 4), (64, 64, 128, 3, 4)),
    128: ((64, 64, 128, 3, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 8)),
    1 << 31: ((64, 128, 64, 4, 4), (128, 128, 64, 4, 8), (128, 256, 64, 3, 8)),
}
#: Columns of a tile, depth, pipeline stages, warps of :func:`split_k`.
Split = tuple[int, int, int, int]
SPLITS: tuple[Split, ...] = ((32, 256, 4, 4), (64, 128, 4, 4))
#: The most rows of C that :func:`split_k` takes.
SPLIT_ROWS = 16
#: Blocks per multiprocessor that the split aims at, and the most parts.
_BLOCKS_PER_SM = 2
_MOST_PARTS = 32


def configurations(m: int) -> tuple[Configuration, ...]:
    """Those worth a try for ``m`` rows of C."""
    return next(choice for most, choice in _CONFIGURATIONS.items() if m <= most)


def name(configuration: Configuration) -> str:
    """Rows x columns x depth of the tile."""
    return "x".join(map(str, configuration[:3]))


@triton.jit
def _kernel(
    a, b, c, m, n, k,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    # Tiles in groups of rows, so that what neighbours in time read is still in L2.
    rows, columns = tl.cdiv(m, tile_m), tl.cdiv(n, tile_n)
    index = tl.program_id(0)
    first = index // (group * columns) * group
    height = min(rows - first, group)
    row = first + index % (group * columns) % height
    column = index % (group * columns) // height

    in_m = row * tile_m + tl.arange(0, tile_m)
    in_n = column * tile_n + tl.arange(0, tile_n)
    in_k = tl.arange(0, tile_k)
    # Rows and columns beyond the edge read others again; they are not written.
    from_a = a + (in_m % m)[:, None] * stride_am + in_k[None, :] * stride_ak
    from_b = b + in_k[:, None] * stride_bk + (in_n % n)[None, :] * stride_bn
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for done in range(0, k, tile_k):
        part_a = tl.load(from_a, mask=in_k[None, :] < k - done, other=0.0)
        part_b = tl.load(from_b, mask=in_k[:, None] < k - done, other=0.0)
        total = tl.dot(part_a, part_b, total)
        from_a += tile_k * stride_ak
        from_b += tile_k * stride_bk
    to_c = c + in_m[:, None] * stride_cm + in_n[None, :]
    tl.store(to_c, total.to(c.dtype.element_ty), mask=(in_m[:, None] < m) & (in_n[None, :] < n))


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, configuration: Configuration) -> None:
    """``out[m, n] = a[m, k] @ b[k, n]`` summed in fp32; ``out`` is row-major, a and b have any strides."""
    (m, k), n = a.shape, b.shape[1]
    tile_m, tile_n, tile_k, stages, warps = configuration
    grid = (triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n),)
    strides = (*a.stride(), *b.stride(), out.stride(0))
    _kernel[grid](
        a, b, out, m, n, k, *strides, tile_m, tile_n, tile_k, 8, num_stages=stages, num_warps=warps
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def _split_kernel(
    a, b, c, partial, arrived, m, n, k, parts,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    in_m = tl.arange(0, tile_m)
    in_n = tile * tile_n + tl.arange(0, tile_n)
    in_k = part * tile_k + tl.arange(0, tile_k)
    from_a = a + (in_m % m)[:, None] * stride_am + in_k[None, :] * stride_ak
    from_b = b + in_k[:, None] * stride_bk + (in_n % n)[None, :] * stride_bn
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for done in range(part * tile_k, k, parts * tile_k):
        left = k - done + part * tile_k
        part_a = tl.load(from_a, mask=in_k[None, :] < left, other=0.0)
        part_b = tl.load(from_b, mask=in_k[:, None] < left, other=0.0)
        total = tl.dot(part_a, part_b, total)
        from_a += parts * tile_k * stride_ak
        from_b += parts * tile_k * stride_bk

    # Each part in a place of its own; whoever comes last sees all of them.
    within = tl.arange(0, tile_m)[:, None] * tile_n + tl.arange(0, tile_n)[None, :]
    of_tile = partial + tile * parts * tile_m * tile_n + within
    tl.store(of_tile + part * tile_m * tile_n, total)
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1) == parts - 1:
        total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
        for other in range(parts):
            total += tl.load(of_tile + other * tile_m * tile_n, volatile=True)
        to_c = c + in_m[:, None] * stride_cm + in_n[None, :]
        tl.store(to_c, total.to(c.dtype.element_ty), mask=(in_m[:, None] < m) & (in_n[None, :] < n))
        tl.atomic_xchg(arrived + tile, 0)  # for the next product


class SplitK:
    """Splits products of at most :data:`SPLIT_ROWS` rows; those of one instance must not run at once.

    Args:
        sms: Multiprocessors of the GPU.
    """

    def __init__(self, sms: int) -> None:
        self._sms = sms
        self._memory: dict[tuple[int, int, Split], tuple[torch.Tensor, torch.Tensor]] = {}

    def parts(self, n: int, k: int, split: Split) -> int:
        """Into how many parts the contraction is split, so that there is work for all multiprocessors."""
        tiles, deep = -(-n // split[0]), -(-k // split[1])
        return max(1, min(_BLOCKS_PER_SM * self._sms // tiles, deep, _MOST_PARTS))

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, split: Split) -> None:
        """``out[m, n] = a[m, k] @ b[k, n]``, as :func:`matmul`."""
        (m, k), n = a.shape, b.shape[1]
        tile_n, tile_k, stages, warps = split
        tiles, parts = triton.cdiv(n, tile_n), self.parts(n, k, split)
        if (n, k, split) not in self._memory:  # kept: a CUDA graph goes on using it
            partial = torch.empty(tiles * parts * SPLIT_ROWS * tile_n, dtype=torch.float32, device=a.device)
            self._memory[n, k, split] = partial, torch.zeros(tiles, dtype=torch.int32, device=a.device)
        partial, arrived = self._memory[n, k, split]
        strides = (*a.stride(), *b.stride(), out.stride(0))
        _split_kernel[(tiles, parts)](
            a, b, out, partial, arrived, m, n, k, parts, *strides,
            SPLIT_ROWS, tile_n, tile_k, num_stages=stages, num_warps=warps,
        )  # fmt: skip
