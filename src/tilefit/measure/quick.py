"""A quick calibration: how fast this GPU's memory and multiprocessors are beside what is known of its kind.

Nothing is learnt anew: a few dozen real operations of all kinds are measured, and two factors are fitted by
which the times that ship, of this GPU or of a donor, are carried over to this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import islice
from math import log
from statistics import fmean

from tilefit.cost.calibration import Calibration, Quick
from tilefit.cost.model import by_stages, estimate_all
from tilefit.cost.priced import PricedGpu, corrected
from tilefit.cost.streaming import traffic
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.measure.calibration import Candidate, Measure, Progress, candidates, origin
from tilefit.ops import Op

#: Measured at least, so that half of them can tell the two factors; and at most.
_LEAST, _MOST = 24, 240
#: Measured at once.
_TOGETHER = 16
_LONGEST_S = 5e-3
#: Factors that are tried around the best so far, in ever finer steps.
_STEPS = (1.25, 1.08, 1.025)
_WIDTH = 4
#: What a factor has to save of the mean error, over how far (as a logarithm) it is from 1: prices of a kind
#: err together by some per cent. On an H100 88 operations said 1.025 and 0.976, which saved 0.3 % of 9 % and
#: made 29 steps, until then right to 0.5 %, 2.7 % too long. As many drawn anew said a memory 1.06 times as
#: fast without this, and 1.02 with it (of ``benchmarks/results/calibrated_operations_h100.jsonl.gz``).
_STRAYING = 0.05
#: Share of the budget for measuring; the rest is for the fit.
_MEASURING = 0.8


def quick(
    gpu: Gpu,
    measure: Measure,
    *,
    budget_s: float = 50.0,
    versions: Mapping[str, str] | None = None,
    drawn: Mapping[str, Iterator[Candidate]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_progress: Callable[[Progress], None] | None = None,
) -> Calibration:
    """Measure operations of one kind after the other, and fit the two factors, within a time budget.

    On a slow host the fit ends at what it has found by then, its steps being ever finer. Every other
    operation is fitted to; on the rest the errors are stated (``about["errors"]``: mean absolute relative
    error before and after). Arguments as of :func:`tilefit.measure.calibration.calibrate`.

    Raises:
        TilefitError: too few operations could be measured.
    """
    began_s = clock()
    base = _with(gpu, Quick(1.0, 1.0))
    rows: list[tuple[Op, float]] = []
    sources = drawn or candidates(seed=1)
    for number, source in enumerate(sources.values(), start=1):
        feasible = (each for each in source if _is_feasible(each.op, base))
        until_s, most = (number / len(sources) * whole for whole in (_MEASURING * budget_s, _MOST))
        while (used_s := clock() - began_s) < until_s and len(rows) < most:
            if not (few := list(islice(feasible, _TOGETHER))):
                break
            for each, time_s in zip(few, measure(few), strict=True):
                if time_s is not None:  # not too large for this card, and supported by it
                    rows.append((each.op, time_s))
                    if on_progress:
                        on_progress(Progress(each.op.kind, len(rows), used_s / budget_s))
    if len(rows) < _LEAST:
        raise TilefitError(
            f"only {len(rows)} operations could be measured in {budget_s:.0f} s",
            hint="Look whether other programs use the GPU, or leave --quick out.",
        )
    # By pairs, as attention comes with its gradient.
    fitted_to, aside = ([row for i, row in enumerate(rows) if i // 2 % 2 == half] for half in (0, 1))
    best = _fitted(gpu, fitted_to, lambda: clock() - began_s < budget_s)
    about = {
        **origin(gpu, versions),
        "networks": {},
        "quick": best._asdict(),
        "measured": len(rows),
        "errors": {"before": _error(base, aside), "after": _error(_with(gpu, best), aside)},
    }
    return Calibration({}, about, quick=best)


def _fitted(gpu: Gpu, rows: Sequence[tuple[Op, float]], in_time: Callable[[], bool]) -> Quick:
    @cache
    def error(tried: Quick) -> float:
        return _error(_with(gpu, tried), rows) + _STRAYING * sum(abs(log(factor)) for factor in tried)

    best = Quick(1.0, 1.0)
    for step in _STEPS:
        for name in (*Quick._fields, *Quick._fields):
            centre = best
            for power in range(-_WIDTH, _WIDTH + 1):
                tried = centre._replace(**{name: getattr(centre, name) * step**power})
                if in_time() and error(tried) < error(best):
                    best = tried
    return best


def _with(gpu: Gpu, factors: Quick) -> PricedGpu:
    calibration = corrected(Calibration({}, {"gpu": gpu.name}, quick=factors))
    facts = {each.name: getattr(gpu, each.name) for each in fields(Gpu)}
    return PricedGpu(**facts, calibration=calibration)


def _is_feasible(op: Op, gpu: PricedGpu) -> bool:
    return gpu.supports(op.dtype) and estimate_all([op], gpu)[0].time_s < _LONGEST_S


def _error(gpu: PricedGpu, rows: Sequence[tuple[Op, float]]) -> float:
    # Not to be remembered: no other estimate is of these factors.
    predicted = by_stages([traffic(op) for op, _ in rows], gpu)
    return round(fmean(abs(p.time_s / time_s - 1) for p, (_, time_s) in zip(predicted, rows, strict=True)), 4)
