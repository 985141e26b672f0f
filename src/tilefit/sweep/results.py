"""The points of a sweep, as text, JSON, CSV, and pictures."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilefit import console, units
from tilefit.errors import UsageError
from tilefit.formats import renders
from tilefit.report.plot import Line, ceiling
from tilefit.report.series import COLORS, WIDEST, Series, braille_rows, foot
from tilefit.sweep.point import Point, best, by_latency, by_memory, compares_models
from tilefit.sweep.run import Grid

#: Rows of the table of points, unless all are asked for; errors and notes shown.
_ROWS = 24
_SAID = 6
_LINES = 4


@dataclass(frozen=True)
class Results(Series):
    """The points of a sweep and what they are of.

    Attributes:
        grid: What was swept.
        settings: What is the same at every point, in words.
        points: In the order of the grid.
        notes: What a reader must know.
        against: What the plot is over: ``size``, ``latency`` or ``memory``.
        best_batch: The batches were looked through for the best that fits.
    """

    grid: Grid
    settings: tuple[str, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    against: str = "size"
    best_batch: bool = False

    @property
    def title(self) -> str:
        """What was swept, in words."""
        return f"{self.grid.target}, {', '.join(self.settings)}"

    @property
    def varying(self) -> list[str]:
        """The names of what varies, the GPU among them."""
        gpus = ["gpu"] if len(self.grid.gpus) > 1 else []
        return [axis.name for axis in self.grid.axes if len(axis.values) > 1] + gpus

    @property
    def rate(self) -> str:
        """What a throughput is: per GPU, where several work on a step."""
        return f"{self.grid.unit}/s" + ("/GPU" if any(point.gpus > 1 for point in self.points) else "")

    def rows(self) -> list[dict[str, object]]:
        """A row for each point."""
        rows = []
        for point in self.points:
            values = point.to_dict()
            at = values.pop("at")
            rows.append({**at, **values, "notes": "; ".join(point.notes), "error": point.error})
        return rows

    def plot(self) -> tuple[list[Line], str, str, str]:
        """Throughput.

        Raises:
            UsageError: no point is known to be drawn.
        """
        gpus = f" on {self.grid.gpus[0].title}" if len(self.grid.gpus) == 1 else ""
        if not (lines := _lines(self)):
            raise UsageError(
                "there is nothing to draw", hint="Vary a size (--over batch=1..64), or leave out --plot."
            )
        return lines, f"{self.title}{gpus}", _x_label(self), self.rate


@renders(Results, "json")
def as_json(results: Results) -> str:
    """JSON: times in seconds, rates per second; ``frontier`` holds indices into ``points``."""
    places = {id(point): index for index, point in enumerate(results.points)}
    top = best(results.points)
    data = {
        "schema_version": 1,
        "target": results.grid.target,
        "settings": results.settings,
        "unit": results.grid.unit,
        "axes": {axis.name: axis.values for axis in results.grid.axes},
        "notes": results.notes,
        "points": [point.to_dict() for point in results.points],
        "best": places[id(top)] if top else None,
        "frontier": {
            "latency": [places[id(point)] for point in by_latency(results.points)],
            "memory": [places[id(point)] for point in by_memory(results.points)],
        },
    }
    return json.dumps(data, indent=2) + "\n"


def _axis(results: Results) -> str:
    """The size that a plot is over: that with the most values; empty where only settings vary."""
    sizes = [axis for axis in results.grid.axes if axis.is_size and len(axis.values) > 1]
    return max(sizes, key=lambda axis: len(axis.values)).name if sizes else ""


def _x_label(results: Results) -> str:
    labels = {"latency": "step time, ms", "memory": "memory of a GPU, GiB"}
    return labels.get(results.against, _axis(results))


def _groups(results: Results) -> dict[str, list[Point]]:
    """The points that run, by what varies besides the size of the plot."""
    axis = _axis(results)
    groups: dict[str, list[Point]] = {}
    for point in results.points:
        if point.runs and point.items:
            others = [name for name in results.varying if name != axis]
            groups.setdefault(_at(results, point, others) or "step", []).append(point)
    return groups


def _lines(results: Results) -> list[Line]:
    """Throughput over a size, a line for each combination of the others; or over latency or memory, where the
    points of the frontier are joined. Those that reach highest, where there are more than a picture can tell
    apart."""
    axis, groups = _axis(results), _groups(results)
    highest = sorted(groups, key=lambda name: -max(point.items_per_s_per_gpu for point in groups[name]))
    lines = []
    for color, name in enumerate(each for each in groups if each in highest[:_LINES]):
        points = groups[name]
        if results.against == "latency":
            at = [(1e3 * point.time_s, point.items_per_s_per_gpu) for point in by_latency(points)]
        elif results.against == "memory":
            at = [(point.memory_bytes / 2**30, point.items_per_s_per_gpu) for point in by_memory(points)]
        else:
            at = [(float(point.at[axis]), point.items_per_s_per_gpu) for point in points] if axis else []
        if at:
            lines.append(Line(name, tuple(sorted(at)), frozenset(), None, color=color))
    return lines


@renders(Results, "text")
def as_text(results: Results, *, width: int = 80, show_all: bool = False) -> RenderableType:
    """A plot, the best, the frontier, the points, and what it all rests on."""
    gpus = ", ".join(gpu.title for gpu in results.grid.gpus)
    parts: list[RenderableType] = [Text.assemble((results.title, "bold"), f" on {gpus}"), Text()]
    parts += _plot(results, min(width, WIDEST))
    top = best(results.points)
    competing = sum(point.runs for point in results.points)
    if top and (competing > 1 or results.best_batch):
        highest = "highest rate" if compares_models(results.points) else "highest throughput"
        if len(results.points) < results.grid.size:
            highest += f" of the {len(results.points)} points so far"
        name = "best batch that fits" if results.best_batch else highest
        parts += [Text.assemble((f"{name}: ", "bold"), _said(results, top)), Text()]
    frontier = by_latency(results.points)
    if 1 < len(frontier) < competing and not results.best_batch:
        memory = {id(point) for point in by_memory(results.points)}
        listed = frontier if show_all else frontier[:_ROWS]
        more = len(frontier) - len(listed)
        parts += [
            Text(f"Efficient frontier: nothing has more {results.rate} in less time", "bold"),
            _table(results, listed, {id(point): "*" for point in listed if id(point) in memory}),
            Text(
                "*: nor in less memory." + (f" {more} more point{'s' * (more > 1)}: --all." if more else ""),
                "dim",
            ),
            Text(),
        ]
    running = [point for point in results.points if not point.error]
    every = 1 if show_all else -(-len(running) // _ROWS)
    shown = [point for index, point in enumerate(running) if index % every == 0 or point is top]
    parts.append(_table(results, shown, {}))
    if len(shown) < len(running):
        parts.append(Text(f"{len(shown)} of {len(running)} points: --all shows every one.", "dim"))
    common = [*dict.fromkeys(note for note in running[0].notes if all(note in p.notes for p in running))]
    parts += _trouble(results, {*common})
    rests = (
        (point.provenance, gpu.calibration_title)
        for gpu in results.grid.gpus
        for point in running
        if point.gpu == gpu.name
    )
    return Group(*parts, *foot((*common, *results.notes), rests))


def _plot(results: Results, width: int) -> list[RenderableType]:
    lines, groups = _lines(results), _groups(results)
    if not lines or max(len(line.points) for line in lines) < 3:
        return []
    head = Text.assemble((results.rate, "bold"), f" over {_x_label(results)}")
    if len(lines) > 1:
        head.append(": ")
        for index, line in enumerate(lines):
            head.append(line.name, COLORS[index]).append("; " if index + 1 < len(lines) else "")
    if len(groups) > len(lines):
        head.append(f" ({len(lines)} of {len(groups)})", "dim")
    top = ceiling(max(y for line in lines for _, y in line.points))
    joined = [replace(line, points=_joined(line.points, 2 * width)) for line in lines]
    return [head, *braille_rows(joined, width, 10, top), Text()]


def _joined(points: Sequence[tuple[float, float]], count: int) -> tuple[tuple[float, float], ...]:
    """The points with straight lines between them, as dots: about so many."""
    span = points[-1][0] - points[0][0]
    dots = [points[0]]
    for (x0, y0), (x1, y1) in pairwise(points):
        steps = max(1, round(count * (x1 - x0) / span)) if span else 1
        dots += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(1, steps + 1)]
    return tuple(dots)


def _at(results: Results, point: Point, names: Sequence[str] | None = None) -> str:
    """Where a point is on some axes, or on all that vary: ``batch 16, h200``."""
    values = ((name, point.at.get(name, point.gpu)) for name in (results.varying if names is None else names))
    return ", ".join(
        str(value) if name == "gpu" else f"{name.removesuffix('_parallel')} {value}" for name, value in values
    )


def _said(results: Results, point: Point) -> str:
    at = _at(results, point) or point.gpu
    rate = f"{units.number(point.items_per_s_per_gpu)} {results.rate}, " if point.items else ""
    return (
        f"{at}: {rate}{units.seconds(point.time_s)} a step, {units.rate(point.flop_per_s)}, "
        f"{units.capacity(point.memory_bytes)}"
    )


def _table(results: Results, points: Sequence[Point], marks: dict[int, str]) -> Table:
    measured = any(point.predicted_s for point in points)
    samples = any(point.items for point in points)
    table = console.table(
        *(name.removesuffix("_parallel") for name in results.varying),
        ">time",
        ">predicted" if measured else ">80 % interval",
        *([f">{results.rate}"] if samples else []),
        ">TFLOP/s",
        ">GiB",
        *([""] if marks or not all(point.fits for point in points) else []),
    )
    for point in points:
        cells = [str(point.at.get(name, point.gpu)) for name in results.varying]
        cells.append(units.seconds(point.time_s))
        if measured:
            cells.append(units.seconds(point.predicted_s) if point.predicted_s else "")
        else:
            cells.append(f"± {50 * (point.high_s - point.low_s) / point.time_s:.0f} %")
        cells += [units.number(point.items_per_s_per_gpu)] if samples else []
        cells += [units.number(point.flop_per_s / 1e12), units.number(point.memory_bytes / 2**30)]
        mark = marks.get(id(point), "") if point.fits else "does not fit"
        table.add_row(*cells, *([mark] if len(table.columns) > len(cells) else []))
    return table


def _trouble(results: Results, common: Collection[str]) -> list[Text]:
    """Points without a step, and the notes of the others but for common ones: each sentence once."""
    said: dict[tuple[str, str], list[Point]] = {}
    for point in results.points:
        if point.error:
            said.setdefault((point.error, "no step"), []).append(point)
        for note in point.notes:
            if note not in common:
                said.setdefault((note, "note"), []).append(point)
    lines = []
    for (sentence, kind), points in list(said.items())[:_SAID]:
        first = _at(results, points[0])
        more = f" and {len(points) - 1} more" if len(points) > 1 else ""
        style = "red" if kind == "no step" else "yellow"
        lines.append(Text.assemble((f"{kind}, ", style), f"{first}{more}: {sentence.rstrip('.')}."))
    if len(said) > _SAID:
        lines.append(Text(f"and {len(said) - _SAID} more; --output-format json has them all", "dim"))
    return [Text(), *lines] if lines else []
