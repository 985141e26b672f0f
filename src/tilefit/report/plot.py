"""Plots of a few lines over one axis: in a terminal, and as SVG written by hand."""

from __future__ import annotations

from collections.abc import Sequence
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
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class Line:
    """What one plot, or one line of a common plot, shows.

    Attributes:
        name: For the legend.
        points: (x, y) by increasing x; x is positive.
        dips: Which x are marked as dips.
        knee: Which x is marked as the knee, if any.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    dips: frozenset[float]
    knee: float | None


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


def braille(line: Line, width: int, height: int, top: float) -> list[str]:
    """A plot of one line in Braille dots: rows of text with both axes, and marks for the knee and the dips.

    Args:
        line: What to plot.
        width, height: Columns of everything, and rows of the plot's area.
        top: The y at its upper edge; the lower edge is 0.
    """
    margin = max(len(_label(top)), 4) + 2
    columns = max(10, width - margin)
    axis = _Axis(line.points[0][0], line.points[-1][0])
    cells = [[_BLANK] * columns for _ in range(height)]

    def column(x: float) -> int:
        return min(2 * columns - 1, int(axis(x) * 2 * columns))

    for x, y in line.points:
        across = column(x)
        down = min(4 * height - 1, max(0, int((1 - y / top) * 4 * height)))
        cells[down // 4][across // 2] |= _DOTS[across % 2][down % 4]
    rows = []
    for index, row in enumerate(cells):
        label = _label(top) if index == 0 else "0" if index == height - 1 else ""
        rows.append(f"{label:>{margin - 2}} │" + "".join(map(chr, row)).replace(chr(_BLANK), " "))
    rows.append(" " * (margin - 1) + "└" + "─" * columns)
    for name, marked, sign in (
        ("dips", line.dips, "▾"),
        ("knee", () if line.knee is None else (line.knee,), "▲"),
    ):
        if marked:
            places = {column(x) // 2 for x in marked}
            rows.append(
                f"{name:>{margin - 2}}  " + "".join(sign if i in places else " " for i in range(columns))
            )
    ticks = ""
    for tick in axis.ticks(max(2, columns // 8)):
        start = column(tick) // 2
        if start >= len(ticks) and start + len(_label(tick)) <= columns:
            ticks = ticks.ljust(start) + _label(tick) + "  "
    rows.append(" " * margin + ticks)
    return [row.rstrip() for row in rows]


def svg(lines: Sequence[Line], title: str, x_label: str, y_label: str) -> str:
    """A plot of several lines as an SVG document; dips are open circles, the knee is a filled one."""
    width, height, left, right, above, below = 800, 440, 64, 28, 76, 48
    axis = _Axis(lines[0].points[0][0], lines[0].points[-1][0])
    top = ceiling(max(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(left + axis(x) * (width - left - right), 1),
            round(above + (1 - y / top) * (height - above - below), 1),
        )

    base = height - below
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{left}" y="{height - 10}">{escape(x_label)}</text>',
        f'<text x="8" y="{above - 10}">{escape(y_label)}</text>',
    ]
    for tick in (top * part / 4 for part in range(5)):
        y = place(axis.first, tick)[1]
        parts.append(f'<path d="M{left} {y}H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{_label(tick)}</text>')
    for tick in axis.ticks(8):
        x = place(tick, 0)[0]
        parts.append(f'<path d="M{x} {base}v5" stroke="#333"/>')
        parts.append(f'<text x="{x}" y="{base + 18}" text-anchor="middle">{_label(tick)}</text>')
    parts.append(f'<path d="M{left} {base}H{width - right}" stroke="#333"/>')
    for index, line in enumerate(lines):
        color, dash = _COLORS[index % len(_COLORS)], _DASHES[index % len(_DASHES)]
        at = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<g stroke="{color}" fill="none" stroke-width="1.5">')
        parts.append(f'<polyline points="{at}" stroke-dasharray="{dash}"/>')
        for point in line.points:
            if point[0] in line.dips or point[0] == line.knee:
                x, y = place(*point)
                fill = f' fill="{color}"' if point[0] == line.knee else ""
                what = "knee" if fill else "dip"
                label = f"{what}: {_label(point[0])}, {number(point[1])}"
                parts.append(f'<circle cx="{x}" cy="{y}" r="{4 if fill else 2.5}"{fill}>')
                parts.append(f"<title>{escape(label)}</title></circle>")
        legend_x = left + index * 170
        parts.append(f'<path d="M{legend_x} 38h24" stroke-dasharray="{dash}"/></g>')
        parts.append(f'<text x="{legend_x + 30}" y="42">{escape(line.name)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
