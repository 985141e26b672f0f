"""Losses at the root of backward passes: how many feed one step, how they were reduced, in which "
"precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tilefit.precision.events import Accumulated, HalfSum, LossInHalf
from tilefit.precision.ledger import Ledger, Stepped
from tilefit.precision.lines import user_line
from tilefit.precision.recorder import Recorder
from tilefit.precision.regions import name_of


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
        in_autocast: Whether an autocast region was entered since the last step.
        sum_error: The relative error of this step's half-precision sums of gradients, None where none was
            seen.
    """

    def __init__(
        self,
        recorder: Recorder,
        ledger: Ledger,
        line_of: Callable[[int], str],
        in_autocast: Callable[[], bool],
        sum_error: Callable[[], float | None],
    ) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._line_of = line_of
        self._in_autocast = in_autocast
        self._sum_error = sum_error
        self._passes: list[_Pass] = []
        self._pending: LossInHalf | None = None
        ledger.on_backward.append(self._on_backward)
        ledger.on_stepped.append(self._on_stepped)

    def _on_backward(self, roots: Sequence[Tensor] | None) -> None:
        if roots is None or not self._recorder.looking:
            return
        chain = self._ledger.chain
        source = user_line()
        if not self._ledger.accumulating:
            self._passes.clear()
        self._passes.append(_Pass(source, chain.factor if chain.mean else None))
        if chain.half is None:
            return
        operation, dtype, number = chain.half
        line = self._line_of(number)
        marks = frozenset(chain.marks)
        event = LossInHalf(
            source=line or source,
            operation=operation.removesuffix("0").removesuffix("Backward"),
            dtype=dtype.removeprefix("torch."),
            autocast=self._in_autocast(),
            scale=self._ledger.scale_of(marks) if marks else None,
        )
        if line:
            self._pending = None
            self._recorder.emit(event)
        elif self._pending is None:
            # A later step may know the line of the loss; until then this is all there is.
            self._pending = event

    def _on_stepped(self, stepped: Stepped) -> None:
        passes, self._passes = self._passes, []
        if not self._recorder.looking or len(passes) < 2 or len(set(passes)) != 1:
            return
        one = passes[0]
        optimizer = stepped.optimizer
        name = type(optimizer).__name__
        if one.factor is not None:
            factor = one.factor
            self._recorder.emit_once(
                ("accumulated", one.source, len(passes)),
                lambda: Accumulated(source=one.source, module=name, passes=len(passes), factor=factor),
            )
        dtypes = {
            gradient.dtype
            for known in self._ledger.of(optimizer)
            if known.reference is not None and (gradient := known.reference()) is not None
        }
        half = sorted(name_of(dtype) for dtype in dtypes if dtype.itemsize == 2)
        if half:
            error = self._sum_error()
            self._recorder.emit_once(
                ("half sum", one.source, error is None),
                lambda: HalfSum(
                    source=one.source, module=name, dtype=half[0], terms=len(passes), error=error
                ),
            )

    def finish(self) -> None:
        """Say what was kept for a better line."""
        if self._pending is not None:
            self._recorder.emit(self._pending)
