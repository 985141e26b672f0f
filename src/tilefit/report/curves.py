"""Time and rate over a size: the curves, as text, JSON, CSV, and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum, log
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilefit import console, units
from tilefit.cost.curve import LEAST_GAIN, Curve, Point
from tilefit.cost.explain import MOST_GROWTH
from tilefit.formats import renders
from tilefit.report.plot import Line, ceiling
from tilefit.report.series import COLORS, WIDEST, Series, braille_rows, foot

#: Rows of the table of sizes, and of the dips and steps of each curve.
_ROWS = 8
_DIPS = 8
_STEPS = 8
_DIP = f"a size up to {100 * MOST_GROWTH:.0f} % larger takes at least {100 * LEAST_GAIN:.0f} % less time"


@dataclass(frozen=True)
class Family:
    """A curve as predicted and, where it was measured, as measured."""

    predicted: Curve
    measured: Curve | None = None

    @property
    def curves(self) -> list[Curve]:
        """What there is, what is known best last."""
        return [self.predicted, *([self.measured] if self.measured else [])]

    @property
    def lines(self) -> list[Line]:
        """To plot one over the other; knee and dips are those of the last."""
        return [
            _line(each, measured=each is self.measured, marked=each is self.curves[-1])
            for each in self.curves
        ]


@dataclass(frozen=True)
class Curves(Series):
    """Everything about one range of sizes.

    Attributes:
        title: What varies, and what does not.
        over: The size that varies.
        fixed: The other sizes.
        families: The curves to compare; they have the same GPU.
        notes: What a reader must know.
    """

    title: str
    over: str
    fixed: Mapping[str, int]
    families: Sequence[Family]
    notes: tuple[str, ...] = ()

    @property
    def every(self) -> list[Curve]:
        """The curves of all families."""
        return [each for family in self.families for each in family.curves]

    @property
    def gpu_title(self) -> str:
        """Name of the GPU."""
        return self.families[0].predicted.gpu.title

    def rows(self) -> list[dict[str, object]]:
        """A row for each point of each curve; ``next`` is the size to move to from a dip."""
        rows = []
        for each in self.every:
            following = {point.size: dip.better.size for dip in each.dips for point in dip.points}
            for point in each.points:
                row = {"curve": each.name, "provenance": each.provenance, **_point(each, point)}
                row["kernel_families"] = "+".join(point.kernel_families)
                rows.append({**row, "next": following.get(point.size, "")})
        return rows

    def plot(self) -> tuple[list[Line], str, str, str]:
        """TFLOP/s over the size."""
        lines = [
            replace(line, color=color) for color, family in enumerate(self.families) for line in family.lines
        ]
        provenances = ", ".join(dict.fromkeys(each.provenance for each in self.every))
        return lines, f"{self.title} on {self.gpu_title}", self.over, f"TFLOP/s, {provenances}"


def roundest(sizes: Sequence[int]) -> list[int]:
    """The ends of a range and a few of its sizes: multiples of a power of two, where it has them."""
    step = 1
    while len(shown := [size for size in sizes if size % step == 0]) > _ROWS:
        step *= 2
    if len(shown) < _ROWS // 2:
        shown = list(sizes[:: -(-len(sizes) // _ROWS)])
    return sorted({sizes[0], *shown, sizes[-1]})


@renders(Curves, "json")
def as_json(curves: Curves) -> str:
    """JSON: times in seconds, sizes, rates in FLOP/s."""
    data = {
        "schema_version": 1,
        "gpu": curves.families[0].predicted.gpu.name,
        "title": curves.title,
        "over": curves.over,
        "fixed": dict(curves.fixed),
        "notes": curves.notes,
        "curves": [
            {
                "name": each.name,
                "provenance": each.provenance,
                "knee": each.knee.size if each.knee else None,
                "best": each.best.size,
                "steps": [point.size for point in each.steps],
                "too_large": each.too_large,
                "points": [_point(each, point) for point in each.points],
                "dips": [
                    {
                        "sizes": [point.size for point in dip.points],
                        "next": dip.better.size,
                        "time_s": dip.worst.time_s,
                        "next_time_s": dip.better.time_s,
                        "speedup": dip.speedup,
                    }
                    for dip in each.dips
                ],
            }
            for each in curves.every
        ],
    }
    return json.dumps(data, indent=2) + "\n"


def _point(curve: Curve, point: Point) -> dict[str, object]:
    values: dict[str, object] = {
        "size": point.size,
        "time_s": point.time_s,
        "low_s": point.low_s,
        "high_s": point.high_s,
        "flop": point.flop,
        "flop_per_s": point.flop_per_s,
    }
    if point.kernel_families:
        values["kernel_families"] = point.kernel_families
    if curve.unit:
        values[f"{curve.unit}_per_s"] = point.items_per_s
    if point.memory_bytes:
        values["memory_bytes"] = point.memory_bytes
    return values


def _line(curve: Curve, *, measured: bool, marked: bool) -> Line:
    band = ((p.size, p.flop / p.high_s / 1e12, p.flop / p.low_s / 1e12) for p in curve.points)
    return Line(
        curve.name,
        tuple((point.size, point.flop_per_s / 1e12) for point in curve.points),
        frozenset(point.size for dip in curve.dips for point in dip.points) if marked else frozenset(),
        curve.knee.size if curve.knee and marked else None,
        () if measured else tuple(band),
        measured=measured,
    )


@renders(Curves, "text")
def as_text(curves: Curves, *, width: int = 80) -> RenderableType:
    """Plots, a table of sizes, the knees, the dips, and what it all rests on."""
    width = min(width, WIDEST)
    families, over = curves.families, curves.over
    parts: list[RenderableType] = [Text.assemble((curves.title, "bold"), f" on {curves.gpu_title}")]
    top = ceiling(max(each.best.flop_per_s for each in curves.every) / 1e12)
    for family in families:
        name = Text.assemble((family.predicted.name, "bold"), f", TFLOP/s over {over}")
        if family.measured:
            name.append(": ").append("predicted", COLORS[0]).append(" and ").append("measured", COLORS[1])
        parts += [Text(), name]
        parts += braille_rows(family.lines, width, 10 if len(families) == 1 else 6, top)
    parts += [Text(), *_sizes(curves), Text(), _knees(curves)]
    if comparisons := [*_agreement(families), *_ratios(families)]:
        parts += [Text(), *map(Text, comparisons)]
    for family in families:
        parts += [Text(), *_found(over, family.curves[-1])]
    rests = ((each.provenance, each.gpu.calibration_title) for each in curves.every)
    return Group(*parts, *foot(curves.notes, rests))


def _sizes(curves: Curves) -> list[RenderableType]:
    """Times and rates at the roundest of the sizes: a table for all curves, or for each where measured."""
    families, over = curves.families, curves.over
    if len(families) == 1:
        return [_sizes_of(over, families[0])]
    if any(family.measured for family in families):
        return [
            part
            for family in families
            for part in (Text(family.predicted.name, "bold"), _sizes_of(over, family))
        ]
    shown = {*roundest([point.size for point in families[0].predicted.points])}
    rows = (
        [str(points[0].size), *(f"{units.seconds(p.time_s)}, {units.rate(p.flop_per_s)}" for p in points)]
        for points in zip(*(family.predicted.points for family in families), strict=True)
        if points[0].size in shown
    )
    return [console.table(over, *(f">{family.predicted.name}" for family in families), rows=rows)]


def _sizes_of(over: str, family: Family) -> Table:
    """One curve: time, interval, rate; of a step also throughput and memory; the measured time beside it."""
    curve = family.predicted
    measured = {point.size: point for point in family.measured.points} if family.measured else {}
    table = console.table(
        over,
        ">time",
        ">80 % interval",
        *([">measured", ">predicted / measured"] if family.measured else [">rate"]),
        *([f">{curve.unit}/s"] if curve.unit else []),
        *([">memory"] if curve.points[0].memory_bytes else []),
    )
    sizes = [size for size in measured if any(p.size == size for p in curve.points)]
    shown = {*roundest(sizes or [point.size for point in curve.points])}
    for point in curve.points:
        if point.size not in shown:
            continue
        cells = [str(point.size), units.seconds(point.time_s), units.interval(point.low_s, point.high_s)]
        if family.measured:
            real = measured.get(point.size)
            cells += [units.seconds(real.time_s), f"{point.time_s / real.time_s:.2f}"] if real else ["–", ""]
        else:
            cells.append(units.rate(point.flop_per_s))
        cells += [units.number(point.items_per_s)] if curve.unit else []
        cells += [units.capacity(point.memory_bytes)] if point.memory_bytes else []
        table.add_row(*cells)
    return table


def _knees(curves: Curves) -> Table:
    """A line per curve: its knee and its best."""
    over = curves.over
    table = console.table("", f">knee {over}", ">time", ">rate", f">best {over}", ">time", ">rate", ">dips")
    for each in curves.every:
        cells = []
        for point in (each.knee, each.best):
            cells += (
                [str(point.size), units.seconds(point.time_s), units.rate(point.flop_per_s)]
                if point
                else ["–", "", ""]
            )
        table.add_row(each.name, *cells, str(sum(len(dip.points) for dip in each.dips)))
    return table


def _agreement(families: Sequence[Family]) -> list[str]:
    """How far the predictions are from what was measured."""
    lines = []
    for family in families:
        if family.measured is None:
            continue
        predicted = {point.size: point for point in family.predicted.points}
        pairs = [(predicted[real.size], real) for real in family.measured.points if real.size in predicted]
        errors = [abs(guess.time_s / real.time_s - 1) for guess, real in pairs]
        held = sum(guess.low_s <= real.time_s <= guess.high_s for guess, real in pairs) / len(pairs)
        lines.append(
            f"{family.predicted.name}: predictions are {units.share(fsum(errors) / len(errors))} off in the "
            f"mean over {len(pairs)} measured sizes; {units.share(held)} of them lie in the 80 % interval."
        )
    return lines


def _ratios(families: Sequence[Family]) -> list[str]:
    """The time of each curve over that of the first, and how wide the intervals are."""
    if len(families) == 1:
        return []
    chosen = [family.measured or family.predicted for family in families]
    first = {point.size: point for point in chosen[0].points}
    lines = []
    for other in chosen[1:]:
        pairs = [(point, first[point.size]) for point in other.points if point.size in first]
        ratios = {point.size: point.time_s / base.time_s for point, base in pairs}
        mean = exp(fsum(map(log, ratios.values())) / len(ratios))
        low, high = min(ratios, key=lambda n: ratios[n]), max(ratios, key=lambda n: ratios[n])
        apart = sum(point.low_s > base.high_s or point.high_s < base.low_s for point, base in pairs)
        lines.append(
            f"{other.name} / {chosen[0].name}, time: {mean:.2f} (geometric mean), {ratios[low]:.2f} at {low} "
            f"to {ratios[high]:.2f} at {high}; the intervals do not overlap at {apart} of {len(pairs)}."
        )
    widths = (
        f"{each.name} −{100 * median(1 - p.low_s / p.time_s for p in each.points):.0f} to "
        f"+{100 * median(p.high_s / p.time_s - 1 for p in each.points):.0f} %"
        for each in (family.predicted for family in families)
    )
    return [*lines, f"80 % interval of a predicted time, in the median: {', '.join(widths)}."]


def _found(over: str, curve: Curve) -> list[RenderableType]:
    """Where the rate of a curve falls, and which sizes to leave."""
    name = curve.name
    parts: list[RenderableType] = []
    if curve.too_large:
        parts.append(
            Text(
                f"{name}: from {curve.too_large[0]} on, the step does not fit into "
                f"{units.capacity(curve.gpu.memory_bytes)} and is left out"
            )
        )
    if curve.steps:
        named = ", ".join(str(point.size) for point in curve.steps[:_STEPS])
        rest = f" and {len(curve.steps) - _STEPS} more" if len(curve.steps) > _STEPS else ""
        parts.append(
            Text(f"{name}: the rate falls by at least {100 * LEAST_GAIN:.0f} % right after {named}{rest}")
        )
    if not curve.dips:
        return [*parts, Text(f"{name}: no dips ({_DIP})", "green")]
    parts += [Text(f"{name}: dips ({_DIP})", "bold"), _dips(over, curve)]
    if (more := len(curve.dips) - _DIPS) > 0:
        parts.append(Text(f"and {more} more; --output-format json lists them all", "dim"))
    return parts


def _dips(over: str, curve: Curve) -> Table:
    """The slow sizes of a curve, and where to move."""
    named = any(point.kernel_families for point in curve.points)
    columns = [over, ">sizes", ">slowest", f">next {over}", ">time", ">speedup", "kernels"]
    rows = []
    for dip in curve.dips[:_DIPS]:
        first, last = dip.points[0].size, dip.points[-1].size
        old, new = ("+".join(point.kernel_families) for point in (dip.worst, dip.better))
        sizes = str(first) if first == last else f"{first}–{last}"
        times = [units.seconds(dip.worst.time_s), str(dip.better.size), units.seconds(dip.better.time_s)]
        kernels = old if old == new else f"{old} -> {new}"
        rows.append([sizes, str(len(dip.points)), *times, f"{dip.speedup:.2f}x", kernels])
    return console.table(*columns[: 6 + named], rows=(row[: 6 + named] for row in rows))
