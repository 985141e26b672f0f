"""What curves and sweeps have in common: points with a time and a rate, as rows of numbers and as a plot."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from tilefit.formats import renders
from tilefit.report import text
from tilefit.report.plot import Line, braille, svg

#: Columns of a table at most, and the colours of the lines of a plot.
WIDEST = 100
COLORS = ("cyan", "green", "yellow", "magenta")


class Series(ABC):
    """Points of one kind that can be drawn."""

    @abstractmethod
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The numbers of each point, by name."""

    @abstractmethod
    def plot(self) -> tuple[Sequence[Line], str, str, str]:
        """Lines, and the title and the labels of both axes: what :func:`~tilefit.report.plot.svg` takes."""


@renders(Series, "csv")
def as_csv(series: Series) -> str:
    """CSV: a line for each point."""
    rows = series.rows()
    file = io.StringIO()
    writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


@renders(Series, "svg")
def as_svg(series: Series) -> str:
    """The plot as an SVG document."""
    return svg(*series.plot())


def braille_rows(lines: Sequence[Line], width: int, height: int, top: float) -> Iterator[Text]:
    """A plot for a terminal, in colours where there are several lines; see :func:`.plot.braille`."""
    for row in braille(lines, width, height, top):
        style = next((style for sign, style in (("▾", "yellow"), ("▲", "green")) if sign in row.text), "")
        shown = Text(row.text, style, no_wrap=True)
        for place, owner in enumerate(row.owners[: len(row.text)]):
            if owner >= 0 and len(lines) > 1:
                shown.stylize(COLORS[owner], place, place + 1)
        yield shown


def foot(notes: Iterable[str], rests: Iterable[tuple[str, str]]) -> list[Text]:
    """The last lines: notes, and what the times rest on, as pairs of provenance and source."""
    times = ", ".join(dict.fromkeys(text.times(*pair) for pair in rests))
    return [Text(), *(Text(note, "dim") for note in notes), Text(f"Times: {times}.", "dim")]
