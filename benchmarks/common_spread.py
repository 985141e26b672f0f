"""How far off all operations of a step are together on a GPU that nobody measured: the common spread.

    PYTHONPATH=src python benchmarks/common_spread.py

Reads the rows that ``whole_steps.py --measured ... --gpu h100-sxm --left-out --out ...`` and ``timm_tables.py
--record`` left in ``results/``, and prints what :mod:`tilefit.cost.priced` needs: the smallest share of a
step's GPU time which, beside what the operations' own intervals allow, holds the truth in 80 % of the steps.
Steps of timm's models that the host limits say nothing about the GPU and are left out. The models of seed 7
set no constant; those of seed 0 did.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from math import sqrt
from pathlib import Path

from tilefit.cost.estimate import StepEstimate
from tilefit.cost.priced import _GENERAL_SPREAD, PricedGpu

RESULTS = Path(__file__).parent / "results"
HELD = 0.8

#: Their transformers library ran attention as products; today's captures fused attention.
OTHER_MODELS = ("hf:t5",)

#: Predicted time, measured time, half-width of the interval without the common spread.
Row = tuple[float, float, float]


def own_width_s(estimate: StepEstimate, device: PricedGpu) -> float:
    """Half-width of the interval of a step that the GPU limits, without what all its operations share."""
    common_s = device.common_spread * estimate.time_s
    return sqrt(max(0.0, (estimate.high_s - estimate.time_s) ** 2 - common_s**2))


def smallest(rows: Iterable[Row]) -> float:
    """The share that holds the truth in 80 % of the rows."""
    needed = sorted(
        sqrt(max(0.0, (measured - predicted) ** 2 - own**2)) / predicted for predicted, measured, own in rows
    )
    return needed[min(len(needed) - 1, int(HELD * len(needed)))]


def transferred() -> list[Row]:
    """Steps on an H100 by what an H200 took."""
    found = []
    for name in ("whole_steps_h100", "whole_steps_inference_h100"):
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            if "gpu_ms" in row and not row["model"].startswith(OTHER_MODELS):
                found.append((row["predicted_gpu_ms"], row["gpu_ms"], row["own_gpu_ms"]))
    return found


def general(seed: int, file: str = "") -> list[Row]:
    """Steps of timm's models on RTX 3090 and 4090, of some files, in units of the prediction."""
    draws = json.loads((RESULTS / "timm_tables.json").read_text())["draws"]
    rows = [row for draw in draws if draw["seed"] == seed for row in draw["rows"].items() if file in row[0]]
    return [(1.0, measured, own) for _, found in rows for measured, own in found]


def main() -> None:
    for label, rows in (
        ("transferred: H100 by the H200", transferred()),
        ("RTX 3090 and 4090, seed 7", general(7)),
        ("RTX 3090, seed 7", general(7, "3090")),
        ("RTX 4090, seed 7", general(7, "4090")),
        ("RTX 3090 and 4090, seed 0", general(0)),
    ):
        errors = sorted(abs(measured / predicted - 1) for predicted, measured, _ in rows)
        alone = statistics.fmean(abs(measured - predicted) <= own for predicted, measured, own in rows)
        priced_as = statistics.fmean(
            (measured - predicted) ** 2 <= own**2 + (_GENERAL_SPREAD * predicted) ** 2
            for predicted, measured, own in rows
        )
        print(
            f"{label:28} {len(rows):4} steps: common spread {smallest(rows):.3f}; inside without it"
            f" {alone:.0%}, with {_GENERAL_SPREAD:g} {priced_as:.0%}; median error"
            f" {statistics.median(errors):.3f}, 80th percentile {errors[int(HELD * len(errors))]:.3f}"
        )


if __name__ == "__main__":
    main()
