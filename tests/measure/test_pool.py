from __future__ import annotations

import itertools

import pytest
import torch

from tilefit.errors import TilefitError
from tilefit.measure.pool import TORCH_DTYPES, Pool


def pool(capacity_bytes: int = 1 << 20) -> Pool:
    return Pool(torch.device("cpu"), capacity_bytes)


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
def test_no_operand_is_zeros(dtype: str) -> None:
    values = pool().take((1000,), TORCH_DTYPES[dtype]).to(torch.float64)
    assert values.std() > 0.4
    assert values.isfinite().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8"])
def test_floating_point_data_is_normal(dtype: str) -> None:
    values = pool().take((100_000,), TORCH_DTYPES[dtype]).float()
    assert values.mean().item() == pytest.approx(0, abs=0.02)
    assert values.std().item() == pytest.approx(1, abs=0.03)


def test_successive_operands_share_no_memory_until_the_ring_is_full() -> None:
    ring = pool(1 << 16)
    starts = [ring.take((1000,), torch.bfloat16).data_ptr() for _ in range(33)]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert all(gap >= 2000 for gap in gaps[:31])
    assert all((start - starts[0]) % 512 == 0 for start in starts)
    assert starts[32] == starts[0]


def test_an_operand_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(TilefitError, match="exceeds the pool"):
        pool(1 << 10).take((1000,), torch.float32)


def test_indices_stay_below_their_bound() -> None:
    indices = pool().indices((1000,), 7)
    assert indices.min() == 0
    assert indices.max() == 6
