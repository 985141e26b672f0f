from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from tilefit import gpus
from tilefit.cost import estimate_step
from tilefit.cost.calibration import Calibration, Quick, write
from tilefit.cost.launch import REFERENCE_STEP_S
from tilefit.cost.priced import priced
from tilefit.measure.calibration import origin
from tilefit.measure.launch import Host, launch_scale
from tilefit.ops import FORWARD, Gemm, Site, Step, StepOp


def test_it_is_what_a_step_takes_here_over_what_it_took_on_the_reference_host() -> None:
    ticks = count()
    # Between two readings of this clock 50 ms pass: five steps of 10 ms.
    scale = launch_scale(torch.device("cpu"), clock=lambda: 50e-3 * next(ticks))
    assert scale == pytest.approx(10e-3 / REFERENCE_STEP_S)


def test_a_host_that_is_busy_now_and_then_is_no_slower() -> None:
    readings = iter([time for n in range(8) for time in (n, n + (0.05 if n % 4 else 0.2))])
    scale = launch_scale(torch.device("cpu"), clock=lambda: next(readings))
    assert scale == pytest.approx(10e-3 / REFERENCE_STEP_S)


def host(*step_s: float) -> Host:
    """A host on which the steps of a turn take so long, in turn."""
    readings = iter([time for n in range(8) for time in (n, n + 5 * step_s[n % len(step_s)])])
    return Host(torch.device("cpu"), clock=lambda: next(readings))


def test_what_was_found_of_a_host_prices_steps_on_it(tmp_path: Path) -> None:
    gpu = gpus.get("h100-sxm")
    step = Step((StepOp(Gemm(16, 16, 16), FORWARD, Site("net", "model.py:1")),) * 50)
    about = {**origin(gpu, None), "networks": {}, "quick": Quick(1.0, 1.0)._asdict()}
    found = host(3 * REFERENCE_STEP_S).noted(Calibration({}, about, quick=Quick(1.0, 1.0)))
    write(found, tmp_path / "host.npz")
    slow, unknown = estimate_step(step, priced(gpu, tmp_path / "host.npz")), estimate_step(step, gpu)
    assert slow.host_time_s == pytest.approx(3 * unknown.host_time_s)
    # How fast the host is was measured, so that it is surer.
    assert slow.high_s / slow.time_s < unknown.high_s / unknown.time_s
    assert slow.low_s / slow.time_s > unknown.low_s / unknown.time_s


def test_a_host_whose_steps_differ_is_less_sure() -> None:
    assert host(0.01, 0.02).spread > 1.15 * host(0.01, 0.0101).spread
