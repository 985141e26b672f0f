"""On a GPU: every way of computing a product gives the right result, and can be timed."""

from __future__ import annotations

import pytest
import torch

from tilefit.measure import timer
from tilefit.measure.choice import DEFAULT, choose, every_way
from tilefit.measure.cublaslt import WORKSPACE_BYTES, Matmul
from tilefit.measure.pool import Pool
from tilefit.ops import Gemm

pytestmark = pytest.mark.gpu
SHAPES = [(1, 4096, 4096), (7, 1000, 2048), (16, 4095, 4096), (128, 768, 3072), (300, 257, 1025)]


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(torch.device("cuda", 0), 1 << 30)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT", "TT"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_way_is_right_or_says_why_not(pool: Pool, shape: tuple[int, int, int], layout: str) -> None:
    choice = choose(Gemm(*shape, layout=layout), pool, timer.CudaDevice(), replays=3)
    assert not [error for error in choice.errors.values() if "wrong result" in error], choice.errors
    assert choice.regret >= 1.0
    assert DEFAULT in choice.final


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
def test_cublaslt_proposes_algorithms(dtype: str) -> None:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    assert Matmul(Gemm(128, 768, 3072, dtype), 8, workspace).algorithms > 1


def test_all_kinds_of_ways_are_there(pool: Pool) -> None:
    names = " ".join(way.name for way in every_way(Gemm(8, 4096, 4096), pool.device))
    for kind in (DEFAULT, "cublaslt", "cuBLASLt heuristic 1", "Triton 16x", "Triton split-K"):
        assert kind in names
