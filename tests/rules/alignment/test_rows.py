"""ALN003: rows matter only where some operand has them contiguous."""

from __future__ import annotations

from builders import StepBuilder
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_WEIGHT, FORWARD, Gemm
from tilefit.rules import run


def test_an_odd_number_of_rows_costs_a_linear_layer_nothing(h200: Gpu, a100: Gpu) -> None:
    for conv1d in (False, True):
        b = StepBuilder()
        b.linear("fc", 16383, 4096, 4096, conv1d=conv1d)
        for gpu in (h200, a100):
            assert run(b.step(), gpu, select=["ALN"]) == []


def test_rows_from_the_right_are_contiguous(h200: Gpu) -> None:
    b = StepBuilder()
    w, x, y = b.parameter("mix.weight", 4096, 4096), b.tensor(4096, 16383), b.tensor(4096, 16383)
    b.add(Gemm(4096, 16383, 4096, layout="NN"), "mix", FORWARD, (w, x), (y,))
    b.add(Gemm(4096, 4096, 16383, layout="TN"), "mix", BACKWARD_WEIGHT, (y, x), (b.tensor(4096, 4096),))
    (finding,) = run(b.step(), h200, select=["ALN"])
    assert finding.code == "ALN003"
    assert "16383 positions to 16384" in finding.fix
    assert "F.linear" in finding.fix
