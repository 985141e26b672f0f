"""Losses at the root of backward passes: how many feed a step, how they were reduced, in which type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilefit.precision.events import Accumulated, HalfSum, LossInHalf
from tilefit.precision.ledger import Begins, Ledger, Stepped
from tilefit.precision.lines import user_line
from tilefit.precision.recorder import Recorder
from tilefit.precision.tensors import HALF, name_of


@dataclass(frozen=True, slots=True)
class _Pass:
    """One backward pass: its line, and what its loss was multiplied by if it is a mean."""

    source: str
    factor: float | None


class Losses:
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
        self._recorder = recorder
        self._ledger = ledger
        self._line_of = line_of
        self._multiplied = multiplied
        self._sum_error = sum_error
        self._passes: list[_Pass] = []
        self._pending: LossInHalf | None = None
        recorder.on(Begins, self._on_backward)
        recorder.on(Stepped, self._on_stepped)

    def _on_backward(self, begins: Begins) -> None:
        here = begins.here
        if not self._recorder.looking:
            return
        chain = here.chain
        source = user_line()
        if not here.accumulating:
            self._passes.clear()
        self._passes.append(_Pass(source, chain.factor if chain.mean else None))
        if len(self._passes) > 1:
            self._recorder.facts.add("accumulation")
        if chain.half is None:
            return
        operation, dtype, number = chain.half
        line = self._line_of(number)
        event = LossInHalf(
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

    def _on_stepped(self, stepped: Stepped) -> None:
        passes, self._passes = self._passes, []
        multiplied = set(self._multiplied.values()) or {1.0}
        self._multiplied.clear()
        if not self._recorder.looking or len(passes) < 2 or len(set(passes)) != 1:
            return
        source, factor, count = passes[0].source, passes[0].factor, len(passes)
        name = type(stepped.optimizer).__name__
        # What the user's own code multiplies gradients by may be the average; unseen, it may be anything.
        if factor is not None and self._ledger.closely and len(multiplied) == 1:
            event = Accumulated(source=source, module=name, passes=count, factor=factor * multiplied.pop())
            self._recorder.emit_once(("accumulated", source, count), lambda: event)
        values = (gradient.value for gradient in self._ledger.present(stepped.optimizer))
        half = sorted({name_of(value.dtype) for value in values if value is not None and value.dtype in HALF})
        if half:
            error = self._sum_error()
            terms = HalfSum(source=source, module=name, dtype=half[0], terms=count, error=error)
            self._recorder.emit_once(("half sum", source, error is None), lambda: terms)

    def finish(self) -> None:
        """Say what was kept for a better line."""
        if self._pending is not None:
            self._recorder.emit(self._pending)
