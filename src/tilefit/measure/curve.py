"""Measured times where a curve would have predicted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tilefit.cost.estimate import MEASURED, Estimate
from tilefit.cost.model import estimate_all
from tilefit.gpus import Gpu
from tilefit.measure import timer
from tilefit.measure.environment import Environment
from tilefit.measure.pool import Pool
from tilefit.measure.run import Outcome, run_suite
from tilefit.measure.store import Measurement, Store
from tilefit.measure.suites import Entry
from tilefit.ops import Op

#: Shows progress: outcomes and their number in, the same outcomes out.
Watch = Callable[[Iterable[Outcome], int], Iterable[Outcome]]


@dataclass
class Measured:
    """What was measured of the operations of a curve.

    Attributes:
        times: By operation.
        errors: Why an operation could not be measured.
        interrupted: The user stopped it; what was measured is in the store.
    """

    times: dict[Op, Measurement] = field(default_factory=dict)
    errors: dict[Op, str] = field(default_factory=dict)
    interrupted: bool = False

    def knows(self, ops: Iterable[Op]) -> bool:
        """Whether all of the operations were measured."""
        return all(op in self.times for op in ops)

    def reached(self, ops: Iterable[Op]) -> bool:
        """Whether all of the operations had their turn."""
        return all(op in self.times or op in self.errors for op in ops)

    def prices(self, ops: Iterable[Op], gpu: Gpu) -> Sequence[Estimate]:
        """Measured times, with the 20th and 80th percentile; predicted ones where there are none."""
        ops = list(ops)
        found = []
        for op, predicted in zip(ops, estimate_all(ops, gpu), strict=True):
            if measured := self.times.get(op):
                predicted = replace(
                    predicted,
                    time_s=measured.median_s,
                    low_s=measured.low_s,
                    high_s=measured.high_s,
                    kernel_family="",
                    provenance=MEASURED,
                )
            found.append(predicted)
        return found


def measure_ops(
    ops: Iterable[Op],
    store: Store,
    pool: Pool,
    device: timer.Device,
    environment: Environment,
    source: str,
    *,
    watch: Watch = lambda outcomes, total: outcomes,
) -> Measured:
    """Measure operations, each once and cold in L2; what the store holds is not measured again.

    Args:
        ops: In the order in which they are to be measured.
        store: Takes each measurement when it is made.
        pool, device, environment: As of :func:`~tilefit.measure.run.run_suite`.
        source: What they are measured for.
        watch: Shows the progress.
    """
    entries = [Entry(op, source) for op in dict.fromkeys(ops)]
    result = Measured()
    try:
        for outcome in watch(run_suite(entries, store, pool, device, environment), len(entries)):
            if outcome.error:
                result.errors[outcome.entry.op] = outcome.error
    except KeyboardInterrupt:
        result.interrupted = True
    wanted = {entry.op for entry in entries}
    result.times = {m.op: m for m in store if m.op in wanted and m.cold and m.environment == environment}
    return result
