"""The points of a sweep, predicted: captured at few sizes, the rest interpolated, each priced on each GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tilefit.capture.child import captures_in_child
from tilefit.capture.interpolated import SMOOTH, Capture, capture_sizes, first_captures
from tilefit.cost import fuse
from tilefit.cost.footprint import usable_bytes
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import PricedGpu
from tilefit.errors import TilefitError, UsageError
from tilefit.ops import Step
from tilefit.options import AnyOptions, Split, TargetOptions
from tilefit.parallel import SplitStep, estimate_split, split_step
from tilefit.session.fleet import Fleet
from tilefit.sweep.axes import SETTINGS, SPLITS, Axis, Value
from tilefit.sweep.feed import Feed
from tilefit.sweep.kept import Kept
from tilefit.sweep.point import Point

_Values = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is swept.

    Attributes:
        target: As of ``tilefit check``.
        options: How its step is captured, where no axis says otherwise.
        axes: What varies, apart from the GPU.
        gpus: The GPUs.
    """

    target: str
    options: AnyOptions
    axes: tuple[Axis, ...]
    gpus: tuple[PricedGpu, ...]

    @property
    def size(self) -> int:
        """How many points."""
        count = len(self.gpus)
        for axis in self.axes:
            count *= len(axis.values)
        return count

    @property
    def unit(self) -> str:
        """What a throughput counts: ``tokens`` where the sequence varies, else ``samples``."""
        return "tokens" if any(axis.name == "seq" for axis in self.axes) else "samples"


@dataclass(frozen=True, slots=True)
class _Group:
    """Points whose captures differ in one size at most.

    Attributes:
        options: Of all of them.
        values: Of the axes that make up the options.
        over: The size that varies; empty where none does.
        sizes: Its values.
    """

    options: AnyOptions
    values: _Values
    over: str = ""
    sizes: tuple[int, ...] = ()

    @property
    def captures(self) -> list[AnyOptions]:
        """What it takes, as far as one can tell beforehand."""
        return first_captures(self.options, self.over, self.sizes) if self.over else [self.options]

    def options_at(self, size: int) -> AnyOptions:
        return self.options.at_size(self.over, size) if self.over else self.options

    def values_at(self, size: int) -> _Values:
        return {**self.values, self.over: size} if self.over else self.values


@dataclass
class Predictions:
    """The predicted points of a grid; iterate over it once.

    Attributes:
        grid: What is swept.
        timeout_s: How long one capture may take.
        kept: Points of earlier sweeps; None keeps nothing.
        capture: Runs captures.
        fleet: The cluster that does it; None for this machine.
        failure: Why the first point that has no step has none.
    """

    grid: Grid
    timeout_s: float
    kept: Kept | None = None
    capture: Capture = captures_in_child
    fleet: Fleet | None = None
    failure: TilefitError | None = None

    def __iter__(self) -> Iterator[Point]:
        """Every point of the grid, group by group; what cannot be captured has an error.

        Raises:
            UsageError: an option is not understood.
            KeyboardInterrupt: the user stopped it; the points so far are in the store.
        """
        cases = list(_cases(self.grid))
        open_groups = []
        for group in _groups(self.grid):
            known, missing = self._known(group, cases)
            yield from known
            if missing:
                open_groups.append((group, missing))
        for group, (size, case), point in self._made(open_groups):
            if self.kept:
                self.kept.put(group.options_at(size), case.gpu, case.key, point)
            yield point

    def _made(self, work: Sequence[_Work]) -> Iterator[tuple[_Group, tuple[int, _Case], Point]]:
        """The missing points of groups; on a cluster, some groups after the other as they are done."""
        if self.fleet is None:
            for number, index, point in self._points(work):
                group, missing = work[number]
                yield group, missing[index], point
            return
        if len(work) < self.fleet.cores:
            work = [
                (group, own)
                for group, missing in work
                for gpu in self.grid.gpus
                if (own := [each for each in missing if each[1].gpu == gpu])
            ]
        # Groups of a task share the processes that capture them.
        many = -(-len(work) // (_TASKS_PER_CORE * self.fleet.cores))
        tasks = [work[first : first + many] for first in range(0, len(work), many or 1)]
        common = replace(self, kept=None, fleet=None)
        with closing(self.fleet.map(_predicted_there, common, tasks)) as done:
            for place, (points, failure) in done:
                self.failure = self.failure or failure
                for number, index, point in points:
                    group, missing = tasks[place][number]
                    yield group, missing[index], point

    def _points(self, work: Sequence[_Work]) -> Iterator[tuple[int, int, Point]]:
        """The missing points of groups, by the places of both."""
        planned = [options for group, _ in work for options in group.captures]
        with closing(Feed(self.grid.target, planned, self.timeout_s, self.capture)) as feed:
            for number, (group, missing) in enumerate(work):
                for index, point in self._predicted(group, missing, feed):
                    yield number, index, point

    def _known(self, group: _Group, cases: Sequence[_Case]) -> tuple[list[Point], list[tuple[int, _Case]]]:
        """The points of a group that are in the store, and those that are not, by size and case."""
        known, missing = [], []
        for size in group.sizes or (0,):
            for case in cases:
                point = self.kept and self.kept.get(group.options_at(size), case.gpu, case.key)
                if point:
                    known.append(replace(point, at={**group.values_at(size), **case.values}))
                else:
                    missing.append((size, case))
        return known, missing

    def _predicted(
        self, group: _Group, missing: Sequence[tuple[int, _Case]], feed: Feed
    ) -> Iterator[tuple[int, Point]]:
        """The missing points, each with its place among them."""
        steps, notes, interrupted = self._captured(group, sorted({size for size, _ in missing}), feed)
        # Priced together, operations of a kind go through the fitted networks at once.
        every = {entry.op: None for step in steps.values() if isinstance(step, Step) for entry in step.ops}
        for gpu in self.grid.gpus:
            estimate_all(every, gpu)
        for index, (size, case) in enumerate(missing):
            if size not in steps:
                continue
            at = {**group.values_at(size), **case.values}
            try:
                point = case.point(at, steps[size], self.grid.unit, int(at.get("seq", 0)))
                point = replace(point, notes=(*notes, *point.notes))
            except TilefitError as error:
                self.failure = self.failure or error
                point = Point(at, case.gpu.name, error=error.what)
            yield index, point
        if interrupted:
            raise KeyboardInterrupt

    def _captured(
        self, group: _Group, wanted: Sequence[int], feed: Feed
    ) -> tuple[dict[int, Step | TilefitError], tuple[str, ...], bool]:
        """The wanted sizes' steps, or why there is none; what is to be said of them; whether Ctrl-C came."""
        if not group.over:
            (step,) = feed(self.grid.target, [group.options], self.timeout_s)
            return {0: step}, (), False
        try:
            found = capture_sizes(
                self.grid.target, group.options, group.over, group.sizes, self.timeout_s, capture=feed
            )
        except UsageError:
            raise
        except TilefitError as error:
            return dict.fromkeys(wanted, error), (), False
        known = {*found.sizes}
        steps: dict[int, Step | TilefitError] = {size: found.at(size) for size in wanted if size in known}
        if not found.interrupted:
            steps |= {size: found.failed.get(size, _THINNED) for size in wanted if size not in known}
        return steps, found.notes, found.interrupted


#: Tasks for each core of a cluster: a machine that dies takes little with it, and all are at work to the end.
_TASKS_PER_CORE = 3


def _predicted_there(
    predictions: Predictions, work: list[_Work]
) -> tuple[list[tuple[int, int, Point]], TilefitError | None]:
    """On a machine of a cluster: the missing points of some groups, and why the first without a step has
    none."""
    return [*predictions._points(work)], predictions.failure


_UNPRICED = "communication over a link that is unknown is not priced"
_THINNED = TilefitError("not captured: so many sizes are captured one by one only in part")


@dataclass(frozen=True, slots=True)
class _Case:
    """What a captured step is priced with: the GPU, the compiler, the way it is split."""

    gpu: PricedGpu
    values: _Values
    compiled: bool
    split: Split

    @property
    def key(self) -> Mapping[str, Any]:
        return {"compiled": self.compiled, "split": str(self.split)}

    def point(self, at: _Values, step: Step | TilefitError, unit: str, seq: int) -> Point:
        """The step's point; ``seq`` are the tokens of a sample where those are counted.

        Raises:
            TilefitError: there is no step, or it cannot be split this way.
        """
        if isinstance(step, TilefitError):
            raise step
        compiled = self.compiled or step.settings.compiled
        step = replace(step, settings=replace(step.settings, compiled=compiled))
        parts = split_step(step, self.split)
        time = estimate_split(_fused(parts) if compiled else parts, self.gpu)
        return Point(
            at=at,
            gpu=self.gpu.name,
            time_s=time.time_s,
            low_s=time.low_s,
            high_s=time.high_s,
            samples=step.batch,
            items=step.batch * (seq if unit == "tokens" else 1),
            flop=parts.tensor_flop,
            gpus=self.split.gpus,
            memory_bytes=time.memory_bytes,
            fits=time.memory_bytes <= usable_bytes(self.gpu),
            provenance=time.provenance,
            notes=(*parts.problems, *((_UNPRICED,) if time.unpriced else ())),
        )


#: Points of a group that are wanted, by size and case.
_Work = tuple[_Group, list[tuple[int, _Case]]]


def _fused(parts: SplitStep) -> SplitStep:
    return replace(parts, stages=tuple(map(fuse, parts.stages)))


def _cases(grid: Grid) -> Iterator[_Case]:
    """The ways to price each captured step."""
    axes = [axis for axis in grid.axes if axis.name in ("compile", *SPLITS)]
    for gpu in grid.gpus:
        for values in _combinations(axes):
            sizes = {name: int(values[name]) for name in SPLITS if name in values}
            yield _Case(
                gpu,
                {**values, **({"gpu": gpu.name} if len(grid.gpus) > 1 else {})},
                values["compile"] == "on" if "compile" in values else _compiles(grid),
                Split(**{name.removesuffix("_parallel"): size for name, size in sizes.items()}),
            )


def _compiles(grid: Grid) -> bool:
    """Whether the compiler's fusion is asked for; a program says so itself."""
    return isinstance(grid.options, TargetOptions) and grid.options.compile


def _groups(grid: Grid) -> Iterator[_Group]:
    """The captures, by what they share: the size with the most values varies within a group."""
    axes = [axis for axis in grid.axes if axis.name not in ("compile", *SPLITS)]
    smooth = [axis for axis in axes if axis.name in SMOOTH]
    # A batch that a program is not told is made of one run.
    inner = max(smooth, key=lambda axis: (not grid.options.takes(axis.name), len(axis.values)), default=None)
    # The compiler's fusion is applied afterwards, so that both kinds of points share their captures.
    options = grid.options
    base = replace(options, compile=False) if isinstance(options, TargetOptions) else options
    for values in _combinations([axis for axis in axes if axis is not inner]):
        options = options_with(base, values)
        if inner is None:
            yield _Group(options, values)
        else:
            yield _Group(options, values, inner.name, tuple(int(value) for value in inner.values))


def _combinations(axes: Sequence[Axis]) -> Iterator[_Values]:
    for values in product(*(axis.values for axis in axes)):
        yield dict(zip((axis.name for axis in axes), values, strict=True))


def options_with(options: AnyOptions, values: Mapping[str, Value]) -> AnyOptions:
    """The options with the values of some axes: settings, and sizes."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if name == "dtype":
            changed["amp"] = value if value in ("bf16", "fp16") else "off"
            changed["tf32"] = {"fp32": False, "tf32": True}.get(str(value))
        elif name in SETTINGS:
            changed[name] = value if name in ("amp", "optimizer") else value == "on"
        else:
            options = options.at_size(name, int(value), varies=False)
    return replace(options, **changed) if changed else options
