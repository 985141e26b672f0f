from __future__ import annotations

from itertools import count

import pytest
import torch

from tilefit.cost.launch import CALL_S
from tilefit.measure.launch import launch_scale
from tilefit.ops import Attention, Conv, Gemm


def test_it_is_the_mean_of_what_calls_take_here_over_what_the_model_has() -> None:
    ticks = count()
    # Between two readings of this clock 2 ms pass: 100 calls of 20 us.
    scale = launch_scale(torch.device("cpu"), clock=lambda: 2e-3 * next(ticks))
    known = CALL_S[Gemm] * CALL_S[Conv] * CALL_S[Attention]
    assert scale == pytest.approx(20e-6 / known ** (1 / 3))
