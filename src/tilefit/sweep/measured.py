"""Points of a sweep, measured on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from tilefit.cost import MEASURED
from tilefit.cost.footprint import usable_bytes
from tilefit.options import TargetOptions
from tilefit.sweep.best import MOST_MEASUREMENTS, Trial, best_batch
from tilefit.sweep.kept import Kept
from tilefit.sweep.meter import Meter
from tilefit.sweep.point import Point
from tilefit.sweep.run import Grid, options_with

#: Measures the step of a model with a batch; None where the memory does not hold it.
Measure = Callable[[int], Trial | None]


def measured(grid: Grid, points: Sequence[Point], place: torch.device, kept: Kept) -> Iterator[Point]:
    """The points, measured where the prediction says that they fit; the others as they are.

    A model is built once for successive points that differ in their batch alone. What the store holds is not
    measured again.

    Args:
        grid: What is swept, on one GPU.
        points: Its predicted points.
        place: That GPU.
        kept: Measured points.
    """
    last: TargetOptions | None = None
    meter: Measure | None = None
    for point in points:
        if not point.runs:
            yield point
            continue
        options = _options(grid, point)
        known = kept.get(options, grid.gpus[0], {})
        if known is None:
            model = replace(options, batch=None)
            if model != last or meter is None:
                meter = None  # frees the last model before the next is built
                meter, last = Meter(grid.target, model, place), model
            known = _tried(point, meter)
            kept.put(options, grid.gpus[0], {}, known)
        yield replace(known, at=point.at)


def search(
    grid: Grid, points: Sequence[Point], place: torch.device, kept: Kept, meter: Measure | None = None
) -> tuple[list[Point], str]:
    """The batch of the highest throughput that fits, found by :func:`~tilefit.sweep.best.best_batch`.

    Args:
        grid: What is swept: the batch alone, on one GPU.
        points: Its predicted points.
        place: That GPU.
        kept: Measured points.
        meter: Measures; None makes one when it is needed.

    Returns:
        The points, those measured that the search chose, and a sentence about it.
    """
    by_batch = {point.samples: point for point in points}
    found: dict[int, Point] = {}

    def measure(batch: int) -> Trial | None:
        nonlocal meter
        predicted = by_batch[batch]
        options = _options(grid, predicted)
        point = kept.get(options, grid.gpus[0], {})
        if point is None:
            meter = meter or Meter(grid.target, replace(options, batch=None), place)
            point = _tried(predicted, meter)
            kept.put(options, grid.gpus[0], {}, point)
        found[batch] = replace(point, at=predicted.at)
        if not point.fits:
            return None
        return Trial(batch, point.time_s, point.low_s, point.high_s, point.memory_bytes)

    done = best_batch(points, usable_bytes(grid.gpus[0]), measure)
    said = (
        f"Best batch: {done.best.batch}, found with {done.measurements} of at most {MOST_MEASUREMENTS} "
        "measurements."
        if done.best
        else "No batch that was tried fits the memory."
    )
    return [found.get(point.samples, point) for point in points], said


def _options(grid: Grid, point: Point) -> TargetOptions:
    assert isinstance(grid.options, TargetOptions)  # programs are not measured
    compile = point.at.get("compile", "on" if grid.options.compile else "off")
    at = {name: value for name, value in point.at.items() if name not in ("gpu", "compile")}
    options = options_with(grid.options, at)
    assert isinstance(options, TargetOptions)
    return replace(options, compile=compile == "on")


def _tried(point: Point, meter: Measure) -> Point:
    trial = meter(point.samples)
    if trial is None:
        return replace(point, fits=False)
    return replace(
        point,
        time_s=trial.time_s,
        low_s=trial.low_s,
        high_s=trial.high_s,
        memory_bytes=trial.memory_bytes or point.memory_bytes,
        provenance=MEASURED,
        predicted_s=point.time_s,
    )
