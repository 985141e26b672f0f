"""A plain tiled matrix product in Triton with a few tile sizes: an alternative to hold the library against.

No split of the contraction, no persistent blocks: what a user writes in an afternoon.
"""

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
