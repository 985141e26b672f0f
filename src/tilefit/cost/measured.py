"""A run of a step: what it was measured to take prices the step, and changes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tilefit.cost.estimate import MEASURED, Estimate
from tilefit.ops import Step, StepOp


class MeasuredTime(NamedTuple):
    """Seconds one operation took on the GPU: the median of the steps, the least and the most."""

    time_s: float
    low_s: float
    high_s: float


class MeasuredRun:
    """Measured times of a step's operations.

    An operation of the step costs what was measured. One that was not in the run (what a rule would put in
    its place) costs what the model predicts, times the factor by which the model was off on the operations
    that are most like it: of the same module and phase, else of the same kind, else all.

    Args:
        step: What was run.
        times: Of each operation; None where no time is known.
        predicted: The model's estimates of the same operations.
        launch_scale: How much longer than the model's host this one takes to launch.
    """

    def __init__(
        self,
        step: Step,
        times: Sequence[MeasuredTime | None],
        predicted: Sequence[Estimate],
        launch_scale: float | None = None,
    ) -> None:
        self.launch_scale = launch_scale
        # Entries are told apart by identity: equal operations of equal layers took different times.
        self._entries = step.ops
        self._times = {id(entry): time for entry, time in zip(step.ops, times, strict=True)}
        took: dict[tuple[str, ...], float] = defaultdict(float)
        guessed: dict[tuple[str, ...], float] = defaultdict(float)
        for entry, time, estimate in zip(step.ops, times, predicted, strict=True):
            if time is not None and time.time_s:
                for key in _keys(entry):
                    took[key] += time.time_s
                    guessed[key] += estimate.time_s
        self._factors = {key: took[key] / time_s for key, time_s in guessed.items() if time_s}

    def corrected(self, entry: StepOp, predicted: Estimate) -> Estimate:
        """What an operation costs, by the run where it was in it."""
        time = self._times.get(id(entry))
        if time is not None:
            return replace(predicted, **time._asdict(), provenance=MEASURED)
        factor = next((self._factors[key] for key in _keys(entry) if key in self._factors), 1.0)
        return predicted.each(lambda time_s: factor * time_s)


def _keys(entry: StepOp) -> tuple[tuple[str, ...], ...]:
    """What operations have in common that err alike, the closest first."""
    kind, part = entry.op.category, entry.phase
    return ((kind, part, entry.site.module), (kind, part), (kind,), ())
