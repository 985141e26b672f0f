"""A calibration like those of ``tilefit calibrate``, small and of a known effect."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import Calibration, Network, fingerprint, on_analytic
from tilefit.cost.constants import GENERAL, Constants
from tilefit.cost.estimate import ESTIMATED
from tilefit.gpus import Gpu
from tilefit.ops import Gemm

CONSTANTS = replace(GENERAL, provenance=ESTIMATED, math_efficiency=0.5)


def made(
    gpu: Gpu,
    factor: float = 3.0,
    errors: dict[str, float] | None = None,
    constants: Constants = CONSTANTS,
) -> Calibration:
    """A calibration whose network multiplies the first stage's time of products by a factor."""
    inputs = on_analytic([op := Gemm(8, 8, 8)], gpu, [analytic(op, gpu)])[1].shape[1]
    weight = np.zeros((1, inputs, 2), dtype=np.float32)
    bias = np.array([[[np.log(factor), -2.0]]], dtype=np.float32)
    ones = np.ones(inputs, dtype=np.float32)
    network = Network(
        domains=frozenset({"bf16"}),
        low=-100 * ones,
        high=100 * ones,
        mean=0 * ones,
        scale=ones,
        layers=((weight, bias),),
        quantiles=(-1.0, 1.0),
        families=(),
        tiles=(),
        on_analytic=True,
    )
    facts = {
        "domains": ["bf16"],
        "layers": 1,
        "quantiles": [-1.0, 1.0],
        "families": [],
        "tiles": [],
        "on_analytic": True,
        "fingerprint": fingerprint("gemm", gpu, corrects_first_stage=True),
        "trained_rows": 100,
        "held_out_rows": 20,
        "errors": errors or {"datasheet": 0.2, "calibrated": 0.1},
    }
    about = {
        "gpu": gpu.name,
        "date": "2026-01-02T03:04:05Z",
        "launch_scale": 2.0,
        "constants": asdict(constants),
        "networks": {"gemm": facts},
    }
    return Calibration({"gemm": network}, about, constants, 2.0)
