"""ALN003: rows matter only where some operand has them contiguous."""

from __future__ import annotations

from builders import StepBuilder
from tilefit.gpus import Gpu
from tilefit.rules import run


def test_an_odd_number_of_rows_costs_a_linear_layer_nothing(h200: Gpu, a100: Gpu) -> None:
    for conv1d in (False, True):
        b = StepBuilder()
        b.linear("fc", 16383, 4096, 4096, conv1d=conv1d)
        for gpu in (h200, a100):
            assert run(b.step(), gpu, select=["ALN"]) == []
