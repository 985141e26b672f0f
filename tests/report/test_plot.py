from __future__ import annotations

import sys
from io import BytesIO
from itertools import pairwise
from math import hypot
from xml.etree import ElementTree

import pytest
from inline_snapshot import snapshot

from tilefit.errors import UsageError
from tilefit.report.plot import Line, braille, ceiling, svg

SAW = Line(
    "saw", tuple((x, 10.0 * x / -(-x // 16) / 16) for x in range(1, 65)), frozenset({17.0, 33.0}), knee=16
)


def test_a_plot_in_a_terminal() -> None:
    assert "\n".join(row.text for row in braille([SAW], 44, 5, 10.0)) == snapshot("""\
  10 │       ⡠⠂⠁     ⣀⠔⠂⠉   ⢀⢀⠤⠔⠐⠉⠁ ⢀⣀⠠⠤⠒⠐⠉⠉
     │     ⡀⠔    ⡀⠤⠒⠁    ⠔⠐⠊⠁     ⠈⠈⠁
     │   ⢀⠌    ⠐⠉
     │ ⢀⠂⠁
   0 │⠔⠁
     └──────────────────────────────────────
dips           ▾         ▾
knee           ▲
                 20          40          60\
""")


def test_a_long_range_has_a_logarithmic_axis() -> None:
    line = Line("log", tuple((2.0**p, float(p + 1)) for p in range(13)), frozenset(), None)
    rows = braille([line], 60, 4, 13.0)
    assert rows[-1].text.split() == ["1", "4", "16", "64", "256", "1024"]
    assert len(rows) == 4 + 2  # no marks without a knee or dips


@pytest.mark.parametrize("width", [20, 40, 80, 100])
def test_a_plot_keeps_to_its_width(width: int) -> None:
    assert max(len(row.text) for row in braille([SAW], width, 5, 10.0)) <= width


def test_a_single_point_can_be_plotted() -> None:
    line = Line("one", ((64.0, 5.0),), frozenset(), None)
    assert any("64" in row.text for row in braille([line], 40, 4, 10.0))
    ElementTree.fromstring(svg([line], "one", "m", "TFLOP/s"))


@pytest.mark.parametrize(
    ("value", "edge"), [(672.0, 800.0), (0.03, 0.03), (1.0, 1.0), (101.0, 150.0), (9.99, 10.0)]
)
def test_the_upper_edge_is_round_and_not_below_the_value(value: float, edge: float) -> None:
    assert ceiling(value) == pytest.approx(edge)


def test_lines_over_one_another_say_whose_each_dot_is() -> None:
    low = Line("low", ((1.0, 1.0), (64.0, 1.0)), frozenset(), 64)
    high = Line("high", ((1.0, 9.0), (64.0, 9.0)), frozenset({1.0}), None)
    rows = braille([low, high], 40, 4, 10.0)
    assert {*rows[0].owners} == {-1, 1}
    assert {*rows[3].owners} == {-1, 0}
    marks = [row.text.split()[0] for row in rows if "▾" in row.text or "▲" in row.text]
    assert marks == ["dips"], "marks are those of the last line"


SPACE = "{http://www.w3.org/2000/svg}"
BAND = tuple((x, 0.9 * y, 1.1 * y) for x, y in SAW.points)
FAMILY = [
    Line("saw", SAW.points, SAW.dips, SAW.knee, BAND),
    Line("saw measured", SAW.points[::8], frozenset(), None, measured=True),
    Line("a < b", SAW.points, frozenset(), None, color=1),
]


def _places(text: str | None) -> list[tuple[float, ...]]:
    return [tuple(map(float, place.split(","))) for place in (text or "").split()]


def test_svg_shows_every_line_and_mark_inside_its_view() -> None:
    root = ElementTree.fromstring(svg(FAMILY, "rate & time", "m", "TFLOP/s"))
    assert root.findtext(f"{SPACE}title") == "rate & time"
    shapes = [*root.iter(f"{SPACE}polyline"), *root.iter(f"{SPACE}polygon")]
    for shape in shapes:
        assert all(0 <= x <= 800 and 0 <= y <= 440 for x, y in _places(shape.get("points")))
    assert sorted(len(_places(shape.get("points"))) for shape in shapes)[-3:] == [64, 64, 128]
    notes = [circle.findtext(f"{SPACE}title") or "" for circle in root.iter(f"{SPACE}circle")]
    assert [note for note in notes if ":" in note] == ["knee: 16, 10.0", "dip: 17, 5.31", "dip: 33, 6.88"]
    assert len([note for note in notes if ":" not in note]) == 1 + 8, "a measured point each, and the legend"
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert {"saw", "saw measured", "a < b", "m", "TFLOP/s"} <= {*texts}


def test_the_interval_is_inside_the_plot_even_above_the_line() -> None:
    band = Line("l", ((1.0, 9.9), (2.0, 9.9)), frozenset(), None, ((1.0, 5.0, 30.0), (2.0, 5.0, 30.0)))
    root = ElementTree.fromstring(svg([band], "t", "x", "y"))
    (area,) = root.iter(f"{SPACE}polygon")
    assert min(y for _, y in _places(area.get("points"))) >= 70


def test_png_is_the_same_picture() -> None:
    image = pytest.importorskip("PIL.Image")
    from tilefit.report.png import png

    drawn = image.open(BytesIO(png(FAMILY, "rate & time", "m", "TFLOP/s")))
    assert (drawn.format, drawn.size) == ("PNG", (1600, 880))
    colors = {color for _, color in drawn.getcolors(1 << 20)}
    assert {(255, 255, 255), (0, 114, 178), (213, 94, 0)} <= colors
    # The knee of a line, a filled circle: at the place where the SVG has it.
    drawn = image.open(BytesIO(png(FAMILY[:1], "t", "m", "TFLOP/s")))
    root = ElementTree.fromstring(svg(FAMILY[:1], "t", "m", "TFLOP/s"))
    knee = next(c for c in root.iter(f"{SPACE}circle") if "knee" in (c.findtext(f"{SPACE}title") or ""))
    at = round(2 * float(knee.get("cx") or 0)), round(2 * float(knee.get("cy") or 0))
    assert drawn.getpixel(at) == (0, 114, 178)


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilefit.report.png import png

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match="needs Pillow") as refused:
        png(FAMILY, "t", "x", "y")
    assert "pip install pillow" in refused.value.hint


@pytest.mark.parametrize(("dash", "drawn"), [((), 20.0), ((2.0, 3.0), 8.0), ((7.0, 3.0), 14.0)])
def test_dashes_cover_their_share_of_a_bent_line(dash: tuple[float, ...], drawn: float) -> None:
    from tilefit.report.png import _dashed

    pieces = list(_dashed([(0.0, 0.0), (6.0, 0.0), (6.0, 14.0)], dash))
    length = sum(hypot(b[0] - a[0], b[1] - a[1]) for piece in pieces for a, b in pairwise(piece))
    assert length == pytest.approx(drawn)
    assert pieces[0][0] == (0.0, 0.0)
