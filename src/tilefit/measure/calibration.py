"""Fit the cost model's constants to a GPU that nobody has measured, in a few minutes.

An active design: the ceilings first (large products, memory-bound products, the smallest one), then a random
sample, then again and again the products on which models fitted to different parts of what is known
disagree most. Every fifth product of the random sample is never fitted to; on them the error is stated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from math import log
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

from tilefit.cost.estimate import ESTIMATED
from tilefit.cost.fitting import Measured, fit
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.profiles import GENERAL, Constants
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.measure.suites import gemms
from tilefit.ops import Gemm

_SCHEMA = 1
#: Products that show a ceiling each: math, memory (weights, activations), the latency of a kernel.
CEILINGS = (
    Gemm(8192, 8192, 8192),
    Gemm(4096, 4096, 4096),
    Gemm(8, 16384, 16384),
    Gemm(65536, 64, 1024),
    Gemm(64, 64, 64),
)
_SAMPLE, _CANDIDATES, _CHOSEN, _COMMITTEE = 40, 200, 20, 4
_HELD_OUT = 5
_LONGEST_S = 10e-3
#: Share of the budget for measuring; the rest is for the last fit.
_MEASURING = 0.85
_ROUGH, _FINE = 60, 400  # iterations of a committee's and of the last fit
_MOST = 400


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants fitted to a GPU, and how well they predict it.

    Attributes:
        gpu: The GPU's short name.
        date: UTC, ISO 8601.
        software: Driver and versions, as a text.
        constants: For the cost model; ``spread`` is the error's 80 % quantile.
        measured: Products measured.
        error_before, error_after: Mean absolute relative error on the products held out, with the general
            constants and with these.
    """

    gpu: str
    date: str
    software: str
    constants: Constants
    measured: int
    error_before: float
    error_after: float


def calibrate(
    gpu: Gpu,
    measure: Callable[[Gemm], float],
    *,
    budget_s: float = 300.0,
    start: Constants = GENERAL,
    software: str = "",
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    on_progress: Callable[[int, float], None] | None = None,
) -> Calibration:
    """Measure and fit, within a time budget.

    Args:
        gpu: The facts of the GPU.
        measure: Seconds of one product; raises :class:`TilefitError` for one that cannot run.
        budget_s: Time for everything.
        start: Constants the fit starts from.
        software: Recorded with the result.
        seed: Of the shapes and of the fit.
        clock: Seconds; for tests.
        on_progress: Called after each product with their number and the share of the budget that is used.

    Raises:
        TilefitError: fewer products could be measured than there are constants to fit.
    """
    began_s = clock()
    shapes = _shapes(gpu, start, seed)
    fitted_to: list[Measured] = []
    held_out: list[Measured] = []

    def run(product: Gemm, into: list[Measured]) -> None:
        try:
            into.append(Measured(product, gpu, measure(product)))
        except TilefitError:
            return  # too large for this card, or not supported by it
        if on_progress:
            on_progress(len(fitted_to) + len(held_out), min(1.0, (clock() - began_s) / budget_s))

    def time_left() -> bool:
        return clock() - began_s < _MEASURING * budget_s

    for product in CEILINGS:
        run(product, fitted_to)
    for index, product in enumerate(islice(shapes, _SAMPLE)):
        if time_left():
            run(product, held_out if index % _HELD_OUT == 0 else fitted_to)
    while time_left() and len(fitted_to) < _MOST:
        committee = _committee(fitted_to, start, seed + len(fitted_to))
        for product in _most_disputed(list(islice(shapes, _CANDIDATES)), gpu, committee):
            if time_left():
                run(product, fitted_to)
        for product in islice(shapes, _CHOSEN // _HELD_OUT):
            if time_left():
                run(product, held_out)
    if len(fitted_to) < 2 * len(CEILINGS) or not held_out:
        raise TilefitError(
            f"only {len(fitted_to)} products could be measured in {budget_s:.0f} s",
            hint="Give it more time, and look whether other programs use the GPU.",
        )
    constants = fit(fitted_to, start, iterations=_FINE, seed=seed)
    after = sorted(_errors(held_out, constants))
    spread = after[min(len(after) - 1, int(0.8 * len(after)))]
    return Calibration(
        gpu.name,
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software,
        replace(constants, spread=spread, provenance=ESTIMATED),
        len(fitted_to) + len(held_out),
        fmean(_errors(held_out, start)),
        fmean(after),
    )


def _shapes(gpu: Gpu, start: Constants, seed: int) -> Iterator[Gemm]:
    """Endless 16-bit products that do not take too long: what training and inference mostly run."""
    dtype = "bf16" if gpu.supports("bf16") else "fp16"
    for entry in gemms(seed):
        product = entry.op
        if isinstance(product, Gemm) and product.dtype in ("bf16", "fp16"):
            product = replace(product, dtype=dtype)
            if estimate_gemm(product, gpu, start).time_s < _LONGEST_S:
                yield product


def _committee(measured: Sequence[Measured], start: Constants, seed: int) -> list[Constants]:
    """Fits to random halves: where they disagree, nothing known decides."""
    random = Random(seed)
    half = max(2, len(measured) // 2)
    return [
        fit(random.sample(measured, half), start, iterations=_ROUGH, seed=seed + i) for i in range(_COMMITTEE)
    ]


def _most_disputed(products: list[Gemm], gpu: Gpu, committee: list[Constants]) -> list[Gemm]:
    def dispute(product: Gemm) -> float:
        return pstdev(log(estimate_gemm(product, gpu, member).time_s) for member in committee)

    return sorted(products, key=dispute, reverse=True)[:_CHOSEN]


def _errors(measured: Sequence[Measured], constants: Constants) -> list[float]:
    return [abs(estimate_gemm(m.gemm, m.gpu, constants).time_s / m.time_s - 1) for m in measured]


def save(calibration: Calibration, path: Path) -> None:
    """Write a profile file, whole or not at all."""
    text = json.dumps({"schema": _SCHEMA, **asdict(calibration)}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def load(path: Path) -> Calibration:
    """Read a profile file.

    Raises:
        TilefitError: it cannot be read, is of another version, or is damaged. It is left as it is.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") == _SCHEMA:
            known = {f.name for f in fields(Constants)}
            constants = Constants(**{k: v for k, v in data.pop("constants").items() if k in known})
            return Calibration(constants=constants, **data)
        what = "the profile is of another version"
    except OSError as error:
        what = f"the profile cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the profile is damaged: {error!r}"
    raise TilefitError(what, where=str(path), hint="Make a new one: tilefit calibrate.")
