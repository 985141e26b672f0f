from __future__ import annotations

from xml.etree import ElementTree

import pytest
from inline_snapshot import snapshot

from tilefit.report.plot import Line, braille, ceiling, svg

SAW = Line(
    "saw", tuple((x, 10.0 * x / -(-x // 16) / 16) for x in range(1, 65)), frozenset({17.0, 33.0}), knee=16
)


def test_a_plot_in_a_terminal() -> None:
    assert "\n".join(braille(SAW, 44, 5, 10.0)) == snapshot("""\
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
    rows = braille(line, 60, 4, 13.0)
    assert rows[-1].split() == ["1", "4", "16", "64", "256", "1024"]
    assert len(rows) == 4 + 2  # no marks without a knee or dips


@pytest.mark.parametrize("width", [20, 40, 80, 100])
def test_a_plot_keeps_to_its_width(width: int) -> None:
    assert max(map(len, braille(SAW, width, 5, 10.0))) <= width


def test_a_single_point_can_be_plotted() -> None:
    line = Line("one", ((64.0, 5.0),), frozenset(), None)
    assert any("64" in row for row in braille(line, 40, 4, 10.0))
    ElementTree.fromstring(svg([line], "one", "m", "TFLOP/s"))


@pytest.mark.parametrize(
    ("value", "edge"), [(672.0, 800.0), (0.03, 0.03), (1.0, 1.0), (101.0, 150.0), (9.99, 10.0)]
)
def test_the_upper_edge_is_round_and_not_below_the_value(value: float, edge: float) -> None:
    assert ceiling(value) == pytest.approx(edge)


def test_svg_shows_every_line_and_mark_inside_its_view() -> None:
    second = Line("a < b", SAW.points, frozenset(), None)
    root = ElementTree.fromstring(svg([SAW, second], "rate & time", "m", "TFLOP/s"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title") == "rate & time"
    lines = root.findall(f".//{space}polyline")
    assert len(lines) == 2
    for line in lines:
        places = [tuple(map(float, place.split(","))) for place in line.get("points", "").split()]
        assert len(places) == 64
        assert all(0 <= x <= 800 and 0 <= y <= 440 for x, y in places)
    labels = [circle.findtext(f"{space}title") for circle in root.findall(f".//{space}circle")]
    assert labels == ["knee: 16, 10.0", "dip: 17, 5.31", "dip: 33, 6.88"]
    assert "a < b" in [text.text for text in root.findall(f"{space}text")]
