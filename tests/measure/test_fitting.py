from __future__ import annotations

from dataclasses import replace

import pytest

from tilefit.cost.constants import constants
from tilefit.cost.gemm import estimate_gemm
from tilefit.gpus import get
from tilefit.measure.fitting import Measured, fit
from tilefit.ops import Gemm

H100 = get("h100")
SHAPES = [Gemm(m, n, k) for m in (16, 512, 4096) for n in (512, 4096) for k in (512, 4096)]


def test_constants_are_recovered_from_times_they_made() -> None:
    start = constants(H100)
    truth = replace(start, math_efficiency=0.6, kernel_clocks=7000, memory_efficiency=0.7)
    measured = [Measured(g, H100, estimate_gemm(g, H100, truth).time_s) for g in SHAPES]
    fitted = fit(measured, start, ("math_efficiency", "kernel_clocks", "memory_efficiency"), iterations=300)
    assert fitted.math_efficiency == pytest.approx(0.6, rel=0.05)
    for row in measured:
        assert estimate_gemm(row.gemm, H100, fitted).time_s == pytest.approx(row.time_s, rel=0.05)


def test_the_same_arguments_give_the_same_constants() -> None:
    measured = [Measured(g, H100, 1e-4) for g in SHAPES[:4]]
    start = constants(H100)
    assert fit(measured, start, iterations=30) == fit(measured, start, iterations=30)
    assert fit(measured, start, iterations=30, seed=1) != fit(measured, start, iterations=30)
