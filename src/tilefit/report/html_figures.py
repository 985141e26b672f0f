"""Geometry of the figures on the HTML page: the roofline, and curves over the batch.

Everything is in the pixels of a figure's own coordinate system; the page scales it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import atan2, ceil, degrees, floor, log2, log10, sqrt

from tilefit import units
from tilefit.cost.curve import knee
from tilefit.report import text
from tilefit.report.plot import ceiling
from tilefit.report.report import BatchPoint, MemoryMoment, OpRow, Report
from tilefit.report.roof import peak_dtype, peaks
from tilefit.report.text import OpGroup

#: Kinds that have a colour of their own; the others share one.
COLORED_KINDS = ("gemm", "conv", "attention", "recurrent", "pointwise", "copy", "normalization", "optimizer")
#: Radius of the point of an operation that takes the whole step, and of the smallest points.
_LARGEST_RADIUS = 22.0
_SMALLEST_RADIUS = 2.5
#: The roofline's vertical axis ends this far below the highest roof; slower operations lie on its lower edge.
_DEPTH = 1e-6
#: Of a label of the roofline, on a narrow screen.
_LABEL_HEIGHT = 24.0
#: The shortest piece of the step that is drawn by itself, as a share of the GPU's time.
_SHORTEST_PIECE = 0.001


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a figure that data is drawn in."""

    left: float
    top: float
    right: float
    bottom: float

    def x(self, share: float) -> float:
        """The place of a share of the width."""
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, share: float) -> float:
        """The place of a share of the height, from below."""
        return round(self.bottom - share * (self.bottom - self.top), 1)


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis, with its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """What every figure with two axes has: where its data is drawn, and the ticks."""

    frame: Frame
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Roof:
    """A limit of the GPU: a horizontal line from ``x`` to the right edge, with a label of its own height."""

    x: float
    y: float
    label_y: float
    label: str


@dataclass(frozen=True, slots=True)
class Dot:
    """Operations that are the same.

    Attributes:
        index: Their row in the table.
        color: A kind of :data:`COLORED_KINDS`, or ``other``.
    """

    index: int
    x: float
    y: float
    radius: float
    color: str
    note: str


@dataclass(frozen=True, slots=True)
class Roofline(Plot):
    """The roofline plot.

    Attributes:
        memory: Both ends of the slanted roof.
        memory_label: What it stands for.
        angle: Its slope, in degrees.
    """

    memory: tuple[float, float, float, float]
    memory_label: str
    angle: float
    roofs: tuple[Roof, ...]
    dots: tuple[Dot, ...]
    colors: tuple[str, ...]


def roofline(report: Report, groups: Sequence[OpGroup], rates: Sequence[float]) -> Roofline:
    """Every operation by its arithmetic intensity and its rate, under the roofs of the GPU.

    Args:
        groups: The operations, in the order of the table.
        rates: The rate of each, in FLOP/s.
    """
    device = report.device
    limits = peaks(device)
    dtypes = {peak_dtype(group.op, device) for group in groups} | {device.peak_dtype}
    used = sorted((name for name in dtypes if name in limits), key=lambda name: (-limits[name], name))
    placed = [
        (index, group, group.op.flop / group.op.moved_bytes, rate)
        for index, (group, rate) in enumerate(zip(groups, rates, strict=True))
        if group.op.flop and group.op.moved_bytes
    ]
    ridge = limits[used[0]] / device.memory_bandwidth_bytes_per_s
    x_first = floor(log10(min([1.0, *(x for _, _, x, _ in placed)])))
    x_last = ceil(log10(max([10 * ridge, *(x for _, _, x, _ in placed)])))
    y_last = log10(3 * limits[used[0]])
    slowest = min([limits[used[-1]] / 100, *(y for *_, y in placed)])
    y_first = floor(log10(max(slowest, _DEPTH * limits[used[0]])))
    frame = Frame(left=62, top=26, right=700, bottom=366)

    def x_at(value: float) -> float:
        return frame.x((log10(value) - x_first) / (x_last - x_first))

    def y_at(value: float) -> float:
        return frame.y(max((log10(value) - y_first) / (y_last - y_first), 0.0))

    bandwidth = device.memory_bandwidth_bytes_per_s
    start = max(10.0**x_first, 10.0**y_first / bandwidth)
    memory = (x_at(start), y_at(start * bandwidth), x_at(ridge), y_at(limits[used[0]]))
    total_s = sum(group.time_s for group in groups) or 1.0
    dots = [
        _dot(
            index,
            group,
            total_s,
            (x_at(intensity), y_at(rate)),
            f"{units.share(group.time_s / total_s)} of the GPU time",
        )
        for index, group, intensity, rate in placed
    ]
    roofs: list[Roof] = []
    for name in used:
        # Above its line, where the label of the roof above it leaves room.
        y = y_at(limits[name])
        label_y = max(y - 6, roofs[-1].label_y + _LABEL_HEIGHT) if roofs else y - 6
        label = f"{name}: {units.rate(limits[name])}"
        roofs.append(Roof(x_at(limits[name] / bandwidth), y, round(label_y, 1), label))
    return Roofline(
        frame=frame,
        x_ticks=tuple(Tick(x_at(10.0**p), _power(p)) for p in range(x_first, x_last + 1)),
        y_ticks=tuple(Tick(y_at(10.0**p), _power(p)) for p in range(y_first, ceil(y_last))),
        memory=memory,
        memory_label=f"memory: {units.size(bandwidth)}/s",
        angle=_angle(memory),
        roofs=tuple(roofs),
        dots=_by_size(dots),
        colors=tuple(dict.fromkeys(color(group.op.kind) for group in groups)),
    )


def _dot(index: int, group: OpGroup, total_s: float, at: tuple[float, float], note: str) -> Dot:
    """Operations as a dot, its area their share of the time."""
    radius = max(_SMALLEST_RADIUS, _LARGEST_RADIUS * sqrt(group.time_s / total_s))
    return Dot(index, *at, round(radius, 1), color(group.op.kind), f"{text.op_label(group.op)}: {note}")


def _by_size(dots: Iterable[Dot]) -> tuple[Dot, ...]:
    """The small ones lie on top, where they can be pointed at."""
    return tuple(sorted(dots, key=lambda dot: -dot.radius))


def color(kind: str) -> str:
    """The colour class of a kind of operation."""
    return kind if kind in COLORED_KINDS else "other"


def _angle(line: tuple[float, float, float, float]) -> float:
    x1, y1, x2, y2 = line
    return round(degrees(atan2(y2 - y1, x2 - x1)), 1)


def _short(value: float) -> str:
    """A number for an axis: ``250``, ``4096``, ``32.8k``, ``1.6M``."""
    if value < 10_000:
        return f"{value:.4g}"
    power, prefix = (1e6, "M") if value >= 1e6 else (1e3, "k")
    return f"{value / power:.3g}{prefix}"


def _power(exponent: int) -> str:
    """A power of ten as a person writes it: ``0.1``, ``100``, ``10k``, ``1T``."""
    if exponent < 3:
        return f"{10.0**exponent:g}"
    thousands, rest = divmod(exponent, 3)
    return f"{10**rest}{'kMGTPE'[thousands - 1]}"


@dataclass(frozen=True, slots=True)
class Agreement(Plot):
    """Measured over predicted times; ``equal`` are both ends of the line on which they are the same."""

    equal: tuple[float, float, float, float]
    dots: tuple[Dot, ...]


def agreement(groups: Sequence[OpGroup]) -> Agreement | None:
    """Every operation that was measured, by its predicted and its measured time; None where none was.

    Args:
        groups: The operations, in the order of the table.
    """
    placed = []
    for index, group in enumerate(groups):
        pairs = [(op.measured.predicted_s, op.time_s) for op in group.ops if op.measured]
        predicted_s, measured_s = (
            (sum(column) / len(pairs) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
        )
        if predicted_s > 0 and measured_s > 0:
            placed.append((index, group, predicted_s, measured_s))
    if not placed:
        return None
    times = [time_s for *_, predicted_s, measured_s in placed for time_s in (predicted_s, measured_s)]
    first, last = floor(log10(min(times))), max(ceil(log10(max(times))), floor(log10(min(times))) + 1)
    frame = Frame(left=76, top=26, right=452, bottom=326)

    def share(time_s: float) -> float:
        return (log10(time_s) - first) / (last - first)

    total_s = sum(group.time_s for group in groups)
    dots = [
        _dot(
            index,
            group,
            total_s,
            (frame.x(share(predicted_s)), frame.y(share(measured_s))),
            f"predicted {units.seconds(predicted_s)}, measured {units.seconds(measured_s)}",
        )
        for index, group, predicted_s, measured_s in placed
    ]
    powers = [10.0**power for power in range(first, last + 1)]
    return Agreement(
        frame=frame,
        x_ticks=tuple(Tick(frame.x(share(time_s)), _round_time(time_s)) for time_s in powers),
        y_ticks=tuple(Tick(frame.y(share(time_s)), _round_time(time_s)) for time_s in powers),
        equal=(frame.left, frame.bottom, frame.right, frame.top),
        dots=_by_size(dots),
    )


def _round_time(time_s: float) -> str:
    """A power of ten seconds without decimals: ``10 µs``."""
    value, unit = units.seconds(time_s).split()
    return f"{float(value):g} {unit}"


@dataclass(frozen=True, slots=True)
class Panel(Plot):
    """One curve over the batch.

    Attributes:
        title: What is drawn.
        line, band: SVG points of the curve, and of the area of its interval.
        marks: The points themselves, with what to say of each.
        own: The place of the step's own batch.
    """

    title: str
    line: str
    band: str
    marks: tuple[tuple[float, float, str], ...]
    own: tuple[float, float]


@dataclass(frozen=True, slots=True)
class BatchCurve:
    """Rate and time over the batch; ``knee`` is the smallest batch within 5 % of the best rate."""

    panels: tuple[Panel, ...]
    knee: int
    largest: int


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes over the operations of the step, stacked by what they hold.

    Attributes:
        areas: Colour class, owner, and the corners of its area.
        peak: Place and label of the fullest moment.
    """

    frame: Frame
    y_ticks: tuple[Tick, ...]
    areas: tuple[tuple[str, str, str], ...]
    peak: tuple[float, float, str]


@dataclass(frozen=True, slots=True)
class Lane:
    """The step along the GPU's time, divided in one way.

    Attributes:
        title: In which.
        pieces: Colour class, place and width in thousandths of the GPU's time, and what to say of it.
    """

    title: str
    pieces: tuple[tuple[str, float, float, str], ...]


def step_lanes(report: Report) -> tuple[Lane, ...]:
    """The operations in their order, one after the other: by pass, by kind, and by what limits them."""
    total_s = sum(op.time_s for op in report.ops)
    if not total_s:
        return ()
    ways: tuple[tuple[str, Callable[[OpRow], str]], ...] = (
        ("pass", lambda op: op.phase),
        ("kind", lambda op: color(op.kind)),
        ("limited by", lambda op: op.bound),
    )
    return tuple(Lane(title, tuple(_pieces(report.ops, way, total_s))) for title, way in ways)


def _pieces(
    ops: Iterable[OpRow], way: Callable[[OpRow], str], total_s: float
) -> Iterator[tuple[str, float, float, str]]:
    """Neighbours of one class together; what is too short to be seen goes with what follows, as the class
    that takes most of it."""
    at = 0.0  # seconds
    held: dict[str, float] = defaultdict(float)
    first: OpRow | None = None
    for op, after in pairwise((*ops, None)):
        assert op is not None
        first = first or op
        held[way(op)] += op.time_s
        time_s = sum(held.values())
        is_visible = time_s >= _SHORTEST_PIECE * total_s
        if after is None or (is_visible and (len(held) > 1 or way(after) != way(op))):
            name = max(held, key=lambda each: held[each])
            place = text.plain(first.module) or "the whole step"
            note = f"{name}: {units.seconds(time_s)} from {units.seconds(at)} on, from {place} on"
            yield name, round(1000 * at / total_s, 2), round(1000 * time_s / total_s, 2), note
            at += time_s
            held.clear()
            first = None


def memory_color(owner: str) -> str:
    """The colour class of an owner of memory."""
    return owner.replace(" ", "-")


def memory_timeline(moments: Sequence[MemoryMoment]) -> MemoryTimeline | None:
    """The figure; None where nothing is known of a step's memory over time."""
    if len(moments) < 2:
        return None
    frame = Frame(left=76, top=12, right=712, bottom=212)
    totals = [sum(moment.owners.values()) for moment in moments]
    fullest = max(range(len(moments)), key=totals.__getitem__)
    top, last = max(totals), moments[-1].op or 1
    x = [frame.x(moment.op / last) for moment in moments]
    below = [0] * len(moments)
    areas = []
    for owner in dict.fromkeys(owner for moment in moments for owner in moment.owners):
        above = [low + moment.owners.get(owner, 0) for low, moment in zip(below, moments, strict=True)]
        edge = [*zip(x, above, strict=True), *reversed([*zip(x, below, strict=True)])]
        areas.append(
            (memory_color(owner), owner, " ".join(f"{at},{frame.y(size / top)}" for at, size in edge))
        )
        below = above
    return MemoryTimeline(
        frame,
        tuple(Tick(frame.y(share), units.capacity(share * top)) for share in (0.0, 0.5, 1.0)),
        tuple(areas),
        (x[fullest], frame.y(1.0), f"operation {moments[fullest].op}: {units.capacity(top)}"),
    )


def batch_curve(report: Report) -> BatchCurve | None:
    """Both panels; None where the report has no curve."""
    points = report.batch_curve
    if len(points) < 2:
        return None
    return BatchCurve(
        panels=(
            _panel(
                "samples per second",
                report.batch,
                [(p, p.batch / p.time_s, p.batch / p.high_s, p.batch / p.low_s) for p in points],
                _short,
            ),
            _panel(
                "time of a step" if report.settings.training else "time of a call",
                report.batch,
                [(p, p.time_s, p.low_s, p.high_s) for p in points],
                units.seconds,
            ),
        ),
        knee=knee({p.batch: p.batch / p.time_s for p in points}),
        largest=points[-1].batch,
    )


def _panel(
    title: str,
    own: int,
    points: Sequence[tuple[BatchPoint, float, float, float]],
    label: Callable[[float], str],
) -> Panel:
    """A curve of (point, value, low, high) over the logarithm of the batch; the other axis begins at 0."""
    frame = Frame(left=76, top=12, right=452, bottom=212)
    top = ceiling(max(high for *_, high in points))
    first, last = points[0][0].batch, points[-1][0].batch

    def x_at(batch: int) -> float:
        return frame.x(log2(batch / first) / log2(last / first))

    def y_at(value: float) -> float:
        return frame.y(value / top)

    edge = [(x_at(p.batch), y_at(high)) for p, _, _, high in points]
    edge += [(x_at(p.batch), y_at(low)) for p, _, low, _ in reversed(points)]
    at = [(x_at(p.batch), y_at(value)) for p, value, *_ in points]
    powers = [p.batch for p, *_ in points if p.batch.bit_count() == 1]
    return Panel(
        title=title,
        frame=frame,
        x_ticks=tuple(Tick(x_at(batch), _short(batch)) for batch in powers[:: ceil(len(powers) / 7)]),
        y_ticks=tuple(
            Tick(y_at(top * part / 5), label(top * part / 5) if part else "0") for part in range(6)
        ),
        line=_points(at),
        band=_points(edge),
        marks=tuple(
            (*place, f"batch {p.batch}: {label(value)}")
            for place, (p, value, *_) in zip(at, points, strict=True)
        ),
        own=next(place for place, (p, *_) in zip(at, points, strict=True) if p.batch == own),
    )


def _points(at: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in at)
