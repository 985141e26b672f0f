"""Plots of a few lines over one axis: in a terminal, as SVG, and the shapes that a PNG is drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

from tilefit.units import number

#: Dots of a Braille character, from the top: the left column, the right one.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
#: A range over more than this factor has a logarithmic axis.
_MOST_LINEAR = 1000
#: Okabe and Ito's colours, which the colour-blind can tell apart; dashes tell lines apart in print.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_DASHES = ((), (7.0, 3.0), (2.0, 3.0), (9.0, 3.0, 2.0, 3.0))
#: Size of a picture, and its margins, in pixels.
WIDTH, HEIGHT = 800, 440
_LEFT, _RIGHT, _ABOVE, _BELOW = 64, 28, 76, 48
#: Characters times size of a title that fits.
_TITLE = 1300


@dataclass(frozen=True, slots=True)
class Line:
    """What one plot, or one line of a common plot, shows.

    Attributes:
        name: For the legend.
        points: (x, y) by increasing x; x is positive.
        dips: Which x are marked as dips.
        knee: Which x is marked as the knee, if any.
        band: (x, lowest y, highest y) around the line; empty without an interval.
        color: Which of the colours: lines of one family share it.
        measured: Dots that are not joined, as they were measured one by one.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    dips: frozenset[float]
    knee: float | None
    band: tuple[tuple[float, float, float], ...] = ()
    color: int = 0
    measured: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps x to 0..1."""

    first: float
    last: float

    @property
    def logarithmic(self) -> bool:
        return self.last > _MOST_LINEAR * self.first

    def __call__(self, x: float) -> float:
        if self.first == self.last:
            return 0.5
        if self.logarithmic:
            return log2(x / self.first) / log2(self.last / self.first)
        return (x - self.first) / (self.last - self.first)

    def ticks(self, wanted: int) -> list[float]:
        """Round values inside the range, about so many."""
        if not self.logarithmic:
            if self.first == self.last:
                return [self.first]
            step = _step(self.last - self.first, wanted)
            return [tick * step for tick in range(ceil(self.first / step), floor(self.last / step) + 1)]
        powers = range(ceil(log2(self.first)), floor(log2(self.last)) + 1)
        return [2.0**power for power in powers[:: max(1, len(powers) // wanted)]]


def _axis(lines: Sequence[Line]) -> _Axis:
    return _Axis(min(line.points[0][0] for line in lines), max(line.points[-1][0] for line in lines))


def _step(span: float, wanted: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that divides a span into so many at most."""
    rough = span / wanted
    power = 10.0 ** floor(log10(rough))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= rough)


def ceiling(value: float) -> float:
    """A round number at or above a positive value, for the upper edge of a plot."""
    step = _step(value, 5)
    return ceil(value / step) * step


def _label(value: float) -> str:
    return f"{value:g}" if value < 1e6 and value == int(value) else number(value)


# --- in a terminal ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a plot in a terminal.

    Attributes:
        text: What it shows.
        owners: Which line the dots of each character belong to, from the left; -1: none.
    """

    text: str
    owners: tuple[int, ...] = ()


def braille(lines: Sequence[Line], width: int, height: int, top: float) -> list[Row]:
    """A plot in Braille dots: rows with both axes, and marks for the knee and the dips of the last line.

    Args:
        lines: What to plot, one over the other.
        width, height: Columns of everything, and rows of the plot's area.
        top: The y at its upper edge; the lower edge is 0.
    """
    margin = max(len(_label(top)), 4) + 2
    columns = max(10, width - margin)
    axis = _axis(lines)
    cells = [[_BLANK] * columns for _ in range(height)]
    owners = [[-1] * columns for _ in range(height)]

    def column(x: float) -> int:
        return min(2 * columns - 1, int(axis(x) * 2 * columns))

    for owner, line in enumerate(lines):
        for x, y in line.points:
            across = column(x)
            down = min(4 * height - 1, max(0, int((1 - y / top) * 4 * height)))
            cells[down // 4][across // 2] |= _DOTS[across % 2][down % 4]
            owners[down // 4][across // 2] = owner
    rows = []
    for index, row in enumerate(cells):
        label = _label(top) if index == 0 else "0" if index == height - 1 else ""
        start = f"{label:>{margin - 2}} │"
        dots = "".join(map(chr, row)).replace(chr(_BLANK), " ")
        rows.append(Row((start + dots).rstrip(), (*[-1] * len(start), *owners[index])))
    rows.append(Row(" " * (margin - 1) + "└" + "─" * columns))
    marked = lines[-1]
    knee = () if marked.knee is None else (marked.knee,)
    for name, sizes, sign in (("dips", marked.dips, "▾"), ("knee", knee, "▲")):
        if sizes:
            places = {column(x) // 2 for x in sizes}
            signs = "".join(sign if i in places else " " for i in range(columns))
            rows.append(Row(f"{name:>{margin - 2}}  {signs}".rstrip()))
    ticks = ""
    for tick in axis.ticks(max(2, columns // 8)):
        start_column = column(tick) // 2
        if start_column >= len(ticks) and start_column + len(_label(tick)) <= columns:
            ticks = ticks.ljust(start_column) + _label(tick) + "  "
    rows.append(Row((" " * margin + ticks).rstrip()))
    return rows


# --- as a picture ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line through points (pixels from the upper left corner); an area, where it is filled."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float = 1.0
    dash: tuple[float, ...] = ()
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Disc:
    """A circle, filled or open, with a note for who points at it."""

    x: float
    y: float
    radius: float
    color: str
    filled: bool
    note: str


@dataclass(frozen=True, slots=True)
class Text:
    """Words on a baseline; ``anchor`` is ``start``, ``middle`` or ``end``."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: int = 12
    bold: bool = False


Shape = Stroke | Disc | Text


def shapes(lines: Sequence[Line], title: str, x_label: str, y_label: str) -> Iterator[Shape]:
    """What a picture of several lines consists of, back to front: dips are open circles, knees filled."""
    axis = _axis(lines)
    top = ceiling(
        max(y for line in lines for y in (*(y for _, y in line.points), *(high for *_, high in line.band)))
    )

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(_LEFT + axis(x) * (WIDTH - _LEFT - _RIGHT), 1),
            round(_ABOVE + (1 - y / top) * (HEIGHT - _ABOVE - _BELOW), 1),
        )

    base, right = HEIGHT - _BELOW, WIDTH - _RIGHT
    yield Text(_LEFT, 22, title, size=max(8, min(15, _TITLE // len(title))), bold=True)
    yield Text(_LEFT, HEIGHT - 10, x_label)
    yield Text(8, _ABOVE - 10, y_label)
    for line in lines:
        if line.band:
            edge = [place(x, high) for x, _, high in line.band]
            edge += [place(x, low) for x, low, _ in reversed(line.band)]
            yield Stroke(tuple(edge), _COLORS[line.color % len(_COLORS)], filled=True)
    step = _step(top, 5)
    for tick in (step * part for part in range(round(top / step) + 1)):
        y = place(axis.first, tick)[1]
        yield Stroke(((_LEFT, y), (right, y)), "#dddddd")
        yield Text(_LEFT - 6, y + 4, _label(tick), "end")
    for tick in axis.ticks(8):
        x = place(tick, 0)[0]
        yield Stroke(((x, base), (x, base + 5)), "#333333")
        yield Text(x, base + 18, _label(tick), "middle")
    yield Stroke(((_LEFT, base), (right, base)), "#333333")
    legend = (right - _LEFT) / max(4, len(lines))
    for index, line in enumerate(lines):
        color, dash = _COLORS[line.color % len(_COLORS)], _DASHES[line.color % len(_DASHES)]
        at, x, y = [place(*point) for point in line.points], round(_LEFT + index * legend, 1), 38
        if line.measured:
            yield Disc(x + 12, y, 2, color, filled=True, note=line.name)
        else:
            yield Stroke(tuple(at), color, 1.5, dash)
            yield Stroke(((x, y), (x + 24, y)), color, 1.5, dash)
        yield Text(x + 30, y + 4, line.name)
        for (size, value), (across, down) in zip(line.points, at, strict=True):
            known = f"{_label(size)}, {number(value)}"
            if size == line.knee:
                yield Disc(across, down, 4, color, filled=True, note=f"knee: {known}")
            elif size in line.dips:
                yield Disc(across, down, 2.5, color, filled=False, note=f"dip: {known}")
            elif line.measured:
                yield Disc(across, down, 2, color, filled=True, note=known)


def svg(lines: Sequence[Line], title: str, x_label: str, y_label: str) -> str:
    """A plot of several lines as an SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *map(_tag, shapes(lines, title, x_label, y_label)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _tag(shape: Shape) -> str:
    if isinstance(shape, Text):
        style = (f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else "") + (
            f' font-size="{shape.size}"' if shape.size != 12 else ""
        )
        weight = ' font-weight="bold"' if shape.bold else ""
        return f'<text x="{shape.x}" y="{shape.y}"{style}{weight}>{escape(shape.text)}</text>'
    if isinstance(shape, Disc):
        fill = shape.color if shape.filled else "#fff"
        return (
            f'<circle cx="{shape.x}" cy="{shape.y}" r="{shape.radius}" stroke="{shape.color}" fill="{fill}">'
            f"<title>{escape(shape.note)}</title></circle>"
        )
    at = " ".join(f"{x},{y}" for x, y in shape.points)
    if shape.filled:
        return f'<polygon points="{at}" fill="{shape.color}" fill-opacity="{BAND_OPACITY}"/>'
    dash = f' stroke-dasharray="{" ".join(f"{each:g}" for each in shape.dash)}"' if shape.dash else ""
    return (
        f'<polyline points="{at}" fill="none" stroke="{shape.color}" stroke-width="{shape.width:g}"{dash}/>'
    )


#: How opaque the area of an interval is.
BAND_OPACITY = 0.15
