from __future__ import annotations

import pytest

from tilefit.cost import estimate, explain
from tilefit.ops import Gemm


def test_an_odd_vocabulary_is_explained_by_its_operand_and_its_neighbour() -> None:
    explanation = explain(Gemm(16384, 50257, 768), "h200")
    assert explanation.kernel.misaligned == "C"
    assert [o.alignment_bytes for o in explanation.gemm.operands] == [128, 128, 2]
    best = explanation.neighbours[0]
    assert (best.dimension, best.size) in {("n", 50304), ("n", 50432)}
    assert best.speedup > 4
    assert best.estimate == estimate(Gemm(16384, best.size, 768), "h200")
    assert [n.speedup for n in explanation.neighbours] == sorted(
        (n.speedup for n in explanation.neighbours), reverse=True
    )


def test_a_well_shaped_product_has_nothing_to_move_to() -> None:
    explanation = explain(Gemm(4096, 4096, 4096), "h200")
    assert explanation.neighbours == ()
    assert explanation.kernel.misaligned == ""
    assert 0.6 < explanation.peak_share < 0.9
    assert explanation.tile_efficiency == 1.0


def test_the_arithmetic_is_consistent() -> None:
    explanation = explain(Gemm(1000, 1000, 1000), "a100")
    assert explanation.waves == pytest.approx(explanation.plan.blocks / 108)
    assert explanation.floor_s <= explanation.estimate.low_s
    assert 0 < explanation.last_wave_fill <= 1


def test_neighbours_are_never_far() -> None:
    for neighbour in explain(Gemm(33, 4095, 4095), "h200").neighbours:
        size = {"m": 33, "n": 4095, "k": 4095}[neighbour.dimension]
        assert size < neighbour.size <= 1.25 * size


def test_no_older_kernel_is_promised_for_fp8() -> None:
    """torch._scaled_mm takes multiples of 16 alone; half precision falls to older kernels."""
    fp8, bf16 = (explain(Gemm(4096, 4096, 4095, dtype), "h200").kernel for dtype in ("fp8", "bf16"))
    assert "torch._scaled_mm refuses that" in fp8.reason
    assert "older ones can" not in fp8.reason
    assert "older ones can" in bf16.reason
