"""Tile and wave arithmetic: how a product is cut up over a GPU.

Source of the terms and of the examples in the tests: NVIDIA, "Matrix Multiplication Background User's
Guide", sections on tile quantization and wave quantization.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """The block of C that one thread block computes."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


#: The tiles of the libraries' Tensor Core kernels that the model chooses from.
TILES = tuple(Tile(*size) for size in (
    (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128),
    (64, 64),
))  # fmt: skip


#: Those that batches of small products have too.
SMALL_TILES = (*TILES, *(Tile(*size) for size in ((128, 32), (32, 128), (128, 16), (16, 128), (32, 32))))
#: How many blocks may share one tile's contraction.
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Bytes of contraction that one pipeline stage holds: 64 elements of 16 bits.
STAGE_BYTES = 128


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """The next multiple, or the value itself."""
    return ceil_div(value, multiple) * multiple


def count(m: int, n: int, tile: tuple[int, int], batch: int = 1) -> int:
    """Tiles that cover C[m, n], ``batch`` times."""
    return ceil_div(m, tile[0]) * ceil_div(n, tile[1]) * batch


def contraction(k: int, stage: int, split: int = 1) -> int:
    """Elements of the contraction that each of ``split`` blocks goes through, in whole stages."""
    return stage * ceil_div(k, stage * split)


def waves(tiles: int, sms: int) -> float:
    """Tiles over those that run at once; the GPU takes the next whole number of waves' time."""
    return tiles / sms


def tile_efficiency(m: int, n: int, tile: tuple[int, int]) -> float:
    """Share of the computed elements of C that are wanted: 1 where the tile divides it."""
    return m * n / (count(m, n, tile) * tile[0] * tile[1])


def last_wave_fill(tiles: int, sms: int) -> float:
    """Share of the last wave's SMs that hold a tile; 1 where the waves are whole."""
    return (tiles - 1) % sms / sms + 1 / sms
