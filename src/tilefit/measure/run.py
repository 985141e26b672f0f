"""Measure a list of operations into a store: resumable, interruptible, one bad shape stops nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tilefit.errors import TilefitError
from tilefit.measure import timer
from tilefit.measure.environment import Environment, now
from tilefit.measure.microbenchmarks import instance
from tilefit.measure.pool import Pool
from tilefit.measure.store import Measurement, Store
from tilefit.measure.suites import Entry
from tilefit.ops import Op


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one entry: a new measurement, one that was there (both None), or an error."""

    entry: Entry
    measurement: Measurement | None = None
    error: str = ""


def measure_op(
    op: Op, pool: Pool, device: timer.Device, environment: Environment, *, cold: bool = True, source: str = ""
) -> Measurement:
    """Measure one operation.

    Raises:
        TilefitError: PyTorch cannot run it, or it does not fit.
    """
    timing = time_call(op, lambda: instance(op, pool), device, cold=cold)
    times = timing.median_s, timing.low_s, timing.high_s, timing.replays, timing.calls
    clocks = timing.clocks
    card = (clocks.sm_mhz, clocks.power_w, clocks.throttle_reasons) if clocks else (None, None, None)
    return Measurement(op, environment, *times, cold, source, now(), *card)


def time_call(
    op: Op, factory: timer.Factory, device: timer.Device, *, cold: bool = True, replays: int = 9
) -> timer.Timing:
    """Time a call that runs an operation; arguments as of :func:`tilefit.measure.timer.measure`.

    Raises:
        TilefitError: PyTorch cannot run it, or it does not fit.
    """
    try:
        return timer.measure(factory, device, cold=cold, replays=replays)
    except (RuntimeError, ValueError) as error:
        # Out of memory, unsupported shapes, too few values for a statistic; the first line says which.
        raise TilefitError(str(error).partition("\n")[0], where=f"{op.kind} {op.shape} {op.dtype}") from error


def run_suite(
    entries: Sequence[Entry],
    store: Store,
    pool: Pool,
    device: timer.Device,
    environment: Environment,
    *,
    cold: bool = True,
) -> Iterator[Outcome]:
    """Measure what the store does not hold yet; yields an outcome per entry, in order."""
    for entry in entries:
        if store.has(entry.op, environment, cold):
            yield Outcome(entry)
            continue
        try:
            measured = measure_op(entry.op, pool, device, environment, cold=cold, source=entry.source)
        except TilefitError as error:
            yield Outcome(entry, error=str(error))
            continue
        store.add([measured])
        yield Outcome(entry, measured)


def pool_for(device: torch.device, seed: int = 0) -> Pool:
    """A pool whose rings hold many times the L2 cache and leave most of the memory free."""
    if device.type != "cuda":
        return Pool(device, 64 << 20, seed)
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return Pool(device, min(8 << 30, memory_bytes // 16), seed)
