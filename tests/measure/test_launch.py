from __future__ import annotations

from itertools import count

import pytest
import torch

from tilefit.cost.launch import REFERENCE_STEP_S
from tilefit.measure.launch import launch_scale


def test_it_is_what_a_step_takes_here_over_what_it_took_on_the_reference_host() -> None:
    ticks = count()
    # Between two readings of this clock 50 ms pass: five steps of 10 ms.
    scale = launch_scale(torch.device("cpu"), clock=lambda: 50e-3 * next(ticks))
    assert scale == pytest.approx(10e-3 / REFERENCE_STEP_S)


def test_a_host_that_is_busy_half_of_the_time_is_no_slower() -> None:
    readings = iter([time for n in range(8) for time in (n, n + (0.05 if n % 2 else 0.2))])
    scale = launch_scale(torch.device("cpu"), clock=lambda: next(readings))
    assert scale == pytest.approx(10e-3 / REFERENCE_STEP_S)
