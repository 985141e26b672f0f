"""Losses at the root of backward passes: how many feed a step, how they were reduced, in which type."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tilefit.precision import events
from tilefit.precision.ledger import Begins, Ledger, Stepped, Tracker
from tilefit.precision.lines import user_line
from tilefit.precision.recorder import Recorder
from tilefit.precision.tensors import HALF, name_of


class _Pass(NamedTuple):
    """One backward pass: its line, and what its loss was multiplied by if it is a mean."""

    source: str
    factor: float | None


class Losses(Tracker):
    """Looks at the losses of each step.

    Args:
        recorder: Where events go.
        ledger: Knows backward passes, scales and steps.
        line_of: The line of the forward operation with a sequence number, or empty.
        multiplied: What the user multiplied each gradient by since the last step.
        sum_error: The relative error of this step's half-precision sums of gradients, None where none was
            seen.
    """

    def __init__(
        self,
        recorder: Recorder,
        ledger: Ledger,
        line_of: Callable[[int], str],
        multiplied: dict[int, float],
        sum_error: Callable[[], float | None],
    ) -> None:
        super().__init__(recorder, ledger)
        self._line_of = line_of
        self._multiplied = multiplied
        self._sum_error = sum_error
        self._passes: list[_Pass] = []
        self._pending: events.LossInHalf | None = None

    def on_begins(self, begins: Begins) -> None:
        """One more loss."""
        if not self._recorder.looking:
            return
        chain, source = begins.here.chain, user_line()
        if not any(gradient.state.fresh for gradient in self._ledger.mine(begins.here)):
            self._passes.clear()
        self._passes.append(_Pass(source, chain.factor if chain.mean else None))
        if len(self._passes) > 1:
            self._recorder.facts.add("accumulation")
        if chain.half is None:
            return
        operation, dtype, number = chain.half
        line = self._line_of(number)
        event = events.LossInHalf(
            source=line or source,
            operation=operation.removesuffix("0").removesuffix("Backward"),
            dtype=dtype.removeprefix("torch."),
            autocast="autocast" in self._recorder.facts,
            scale=self._ledger.scale_of(chain.marks) if chain.marks else None,
        )
        if line:
            self._pending = None
            self._recorder.emit(event)
        elif self._pending is None:
            # A later step may know the line of the loss; until then this is all there is.
            self._pending = event

    def on_stepped(self, stepped: Stepped) -> None:
        """They have fed a step."""
        passes, self._passes = self._passes, []
        multiplied = set(self._multiplied.values()) or {1.0}
        self._multiplied.clear()
        if not self._recorder.looking or len(passes) < 2 or len(set(passes)) != 1:
            return
        factor, count = passes[0].factor, len(passes)
        place = passes[0].source, type(stepped.optimizer).__name__
        # What the user's own code multiplies gradients by may be the average; unseen, it may be anything.
        if factor is not None and self._ledger.closely and len(multiplied) == 1:
            self._recorder.emit(events.Accumulated(*place, passes=count, factor=factor * multiplied.pop()))
        values = (gradient.value for gradient in self._ledger.present(stepped.optimizer))
        half = sorted({name_of(value.dtype) for value in values if value is not None and value.dtype in HALF})
        if half:
            error = self._sum_error()
            self._recorder.emit(events.HalfSum(*place, dtype=half[0], terms=count, error=error))

    def finish(self) -> None:
        """Say what was kept for a better line."""
        if self._pending is not None:
            self._recorder.emit(self._pending)
