"""The stages of a sweep: points from the store, predicted, and measured; what there is when it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tilefit.capture.child import captures_in_child
from tilefit.measure.store import Store
from tilefit.options import TargetOptions
from tilefit.session.fleet import Fleet
from tilefit.sweep.kept import Kept
from tilefit.sweep.point import Point
from tilefit.sweep.results import Results
from tilefit.sweep.run import Grid, Predictions

if TYPE_CHECKING:
    import torch

#: Shows progress: what is done, an iterable and its length in, the same items out.
Watch = Callable[[str, Iterable[Any], int], Iterable[Any]]


class SweepSession:
    """One sweep of one grid.

    Args:
        grid: What is swept.
        store: Keeps the points.
        timeout_s: How long one capture may take.
        fresh: Compute points again that are in the store.
        best_batch: The batches are looked through for the best that fits.
        local: Where steps are measured, and what describes it; None predicts alone.
        watch: Shows progress.
        fleet: The cluster that predicts; None for this machine.
    """

    def __init__(
        self,
        grid: Grid,
        store: Store,
        *,
        timeout_s: float,
        fresh: bool = False,
        best_batch: bool = False,
        local: tuple[torch.device, Sequence[str]] | None = None,
        watch: Watch = lambda what, items, total: items,
        fleet: Fleet | None = None,
    ) -> None:
        self.grid = grid
        self.best_batch = best_batch
        #: Ctrl-C came before all points were there.
        self.interrupted = False
        self._local = local
        self._watch = watch
        # What a program reads nobody can list.
        kept = isinstance(grid.options, TargetOptions)
        self._kept = Kept(store, grid.target, fresh=fresh)
        self._kept_measured = Kept(store, grid.target, fresh=fresh, measured=local[1] if local else ())
        capture = partial(captures_in_child, fresh=fresh, gpu=grid.gpus[0].name)
        self._predictions = Predictions(grid, timeout_s, self._kept if kept else None, capture, fleet)
        self._where = f" on {fleet.size}" if fleet else ""
        self._notes: list[str] = []

    @property
    def known(self) -> int:
        """How many points were in the store."""
        return self._kept.found

    @cached_property
    def predicted(self) -> list[Point]:
        """Every point, or those until Ctrl-C."""
        return self._collected(f"Predicting{self._where}", self._predictions, self.grid.size)

    @cached_property
    def points(self) -> list[Point]:
        """The predicted points, or what was measured of them.

        Raises:
            TilefitError: none of them has a step; why the first has none.
        """
        points = _fitting(self.predicted) if self.best_batch and not self.interrupted else self.predicted
        if self._local and not self.interrupted:
            points = self._measured(points, self._local[0])
            note = "Measured: steps back to back, random weights and inputs, the median of five turns."
            self._notes.append(note)
        if self._predictions.failure and all(point.error for point in points):
            raise self._predictions.failure
        return points

    def results(self, against: str = "size") -> Results:
        """What there is, as data; the plot is over ``against``."""
        options, points = self.grid.options, self.points
        # What is fixed and cannot be seen from the axes is told above the results.
        settings = (
            *options.words,
            *(f"{name} {value}" for name, value in options.own_sizes.items() if value is not None),
        )
        notes = tuple(dict.fromkeys(self._notes))
        return Results(self.grid, settings, _sorted(self.grid, points), notes, against, self.best_batch)

    def _measured(self, predicted: list[Point], place: torch.device) -> list[Point]:
        from tilefit.sweep.measured import measured, search

        if not self.best_batch:
            real = measured(self.grid, predicted, place, self._kept_measured)
            return self._collected("Measuring", real, len(predicted))
        try:
            points, said = search(self.grid, predicted, place, self._kept_measured)
        except KeyboardInterrupt:
            self.interrupted = True
            return predicted
        self._notes.append(said)
        return points

    def _collected(self, what: str, points: Iterable[Point], total: int) -> list[Point]:
        collected: list[Point] = []
        try:
            for point in self._watch(what, points, total):
                collected.append(point)
        except KeyboardInterrupt:
            self.interrupted = True
        return collected


def _fitting(points: list[Point]) -> list[Point]:
    """Without the batches that do not fit, but for the first of them."""
    fitting = [point for point in points if point.runs]
    beyond = sorted((p for p in points if not p.fits and not p.error), key=lambda point: point.samples)
    return [*fitting, *beyond[:1]] if fitting else points


def _sorted(grid: Grid, points: Iterable[Point]) -> tuple[Point, ...]:
    """In the order of the grid: the first axis varies slowest."""
    order = {axis.name: {value: i for i, value in enumerate(axis.values)} for axis in grid.axes}
    gpus = [gpu.name for gpu in grid.gpus]
    return tuple(
        sorted(points, key=lambda p: (gpus.index(p.gpu), *(order[name].get(p.at[name], 0) for name in order)))
    )
