"""Fits the constants of a GPU to measured products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log
from random import Random
from statistics import fmean
from typing import NamedTuple

from tilefit.cost.constants import Constants
from tilefit.cost.gemm import schedule
from tilefit.cost.kernels import select
from tilefit.gpus import Gpu
from tilefit.ops import Gemm

#: What may be fitted, with the range a constant can sensibly have.
RANGES = {
    "kernel_clocks": (500.0, 9000.0),
    "split_s": (0.2e-6, 6e-6),
    "memory_efficiency": (0.5, 1.0),
    "write_weight": (1.0, 3.0),
    "math_efficiency": (0.3, 1.0),
    "small_tile_exponent": (0.001, 0.8),
    "prologue_bytes": (1.0, 800.0),
    "saturating_share": (0.02, 0.9),
    "overlap": (1.2, 12.0),
}
#: How far a constant is expected to be from where the search starts, as a logarithm, and what straying that
#: far costs: with few measurements the start decides, with many the measurements do.
_EXPECTED_DEVIATION = 0.5
_DEVIATION_COST = 0.001


class Measured(NamedTuple):
    """A product with its measured time, in a CUDA graph or otherwise without the host's launch."""

    gemm: Gemm
    gpu: Gpu
    time_s: float


def fit(
    measured: Sequence[Measured],
    start: Constants,
    names: Iterable[str] = tuple(RANGES),
    *,
    iterations: int = 600,
    seed: int = 0,
) -> Constants:
    """The constants that predict the measured times best, by a clipped random search in their logarithms.

    Minimises the mean absolute log ratio, in which being twice too slow and twice too fast weigh alike, each
    GPU the same. The same arguments give the same constants.

    Args:
        measured: What to fit; on several GPUs for constants they are to share.
        start: Where the search starts, and what it keeps near when there is little to fit.
        names: The constants to fit, of :data:`RANGES`.
    """
    free = tuple(names)
    weights = {gpu: 1 / sum(m.gpu == gpu for m in measured) for gpu in {m.gpu for m in measured}}
    scale = 1 / len(weights)
    rows = [(m, select(m.gemm, m.gpu), scale * weights[m.gpu]) for m in measured]
    origin = {name: getattr(start, name) for name in free}

    def loss(values: dict[str, float]) -> float:
        constants = replace(start, **values)  # type: ignore[arg-type]
        error = 0.0
        for m, kernel, weight in rows:
            time_s = schedule(m.gemm, m.gpu, constants, kernel).time_s + constants.kernel_s(m.gpu)
            error += weight * abs(log(time_s / m.time_s))
        strayed = fmean((log(values[n] / origin[n]) / _EXPECTED_DEVIATION) ** 2 for n in free)
        return error + _DEVIATION_COST * strayed

    random = Random(seed)
    best = dict(origin)
    best_loss, step = loss(best), 0.3
    for _ in range(iterations):
        trial = dict(best)
        for name in free:
            if random.random() < 0.4:
                low, high = RANGES[name]
                trial[name] = min(max(trial[name] * exp(step * random.gauss(0, 1)), low), high)
        trial_loss = loss(trial)
        if trial_loss < best_loss:
            best, best_loss, step = trial, trial_loss, min(0.4, step * 1.1)
        else:
            step = max(0.02, step * 0.99)
    return replace(start, **best)
