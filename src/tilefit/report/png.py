"""A plot as PNG, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from math import hypot
from typing import Any

from tilefit.errors import UsageError
from tilefit.formats import renders
from tilefit.report.plot import BAND_OPACITY, HEIGHT, WIDTH, Disc, Line, Shape, Stroke, Text, shapes
from tilefit.report.series import Series

#: Pixels of the file per pixel of the plot, and how much larger it is drawn first, for smooth edges.
_SCALE = 2
_FACTOR = 2 * _SCALE
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


@renders(Series, "png")
def as_png(series: Series) -> bytes:
    """The plot as a PNG file. Errors as of :func:`png`."""
    return png(*series.plot())


def png(lines: Sequence[Line], title: str, x_label: str, y_label: str) -> bytes:
    """A plot of several lines as a PNG file, the same as :func:`tilefit.report.plot.svg` makes.

    Raises:
        UsageError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise UsageError(
            f"a PNG needs Pillow ({error})",
            hint="Run: pip install pillow, or write an SVG: --plot FILE.svg.",
        ) from error
    image = Image.new("RGBA", (WIDTH * _FACTOR, HEIGHT * _FACTOR), "#ffffff")
    for shape in shapes(lines, title, x_label, y_label):
        if isinstance(shape, Stroke) and shape.filled:
            area = Image.new("RGBA", image.size)
            opacity = round(255 * BAND_OPACITY)
            ImageDraw.Draw(area).polygon(_scaled(shape.points), fill=f"{shape.color}{opacity:02x}")
            image.alpha_composite(area)
        else:
            _draw(ImageDraw.Draw(image), shape)
    file = BytesIO()
    small = image.convert("RGB").resize((WIDTH * _SCALE, HEIGHT * _SCALE), Image.Resampling.LANCZOS)
    small.save(file, "PNG", optimize=True)
    return file.getvalue()


def _draw(canvas: Any, shape: Shape) -> None:
    if isinstance(shape, Text):
        from PIL import ImageFont

        font = ImageFont.load_default(shape.size * _FACTOR)  # it comes with Pillow: the same everywhere
        canvas.text(
            (shape.x * _FACTOR, shape.y * _FACTOR),
            shape.text,
            fill="#000000",
            font=font,
            anchor=_ANCHORS[shape.anchor],
            stroke_width=1 if shape.bold else 0,
        )
    elif isinstance(shape, Disc):
        canvas.circle(
            (shape.x * _FACTOR, shape.y * _FACTOR),
            shape.radius * _FACTOR,
            fill=shape.color if shape.filled else "#ffffff",
            outline=shape.color,
            width=_FACTOR,
        )
    else:
        for piece in _dashed(_scaled(shape.points), [each * _FACTOR for each in shape.dash]):
            canvas.line(piece, fill=shape.color, width=round(shape.width * _FACTOR), joint="curve")


def _scaled(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x * _FACTOR, y * _FACTOR) for x, y in points]


def _dashed(
    points: Sequence[tuple[float, float]], dash: Sequence[float]
) -> Iterator[list[tuple[float, float]]]:
    """The pieces of a line that are drawn; ``dash`` holds lengths, drawn and left out in turn."""
    if not dash:
        yield list(points)
        return
    turn, left = 0, dash[0]
    piece = [points[0]]
    for end in points[1:]:
        while (distance := hypot(end[0] - piece[-1][0], end[1] - piece[-1][1])) > left:
            (x, y), share = piece[-1], left / distance
            piece.append((x + (end[0] - x) * share, y + (end[1] - y) * share))
            if turn % 2 == 0:
                yield piece
            piece = [piece[-1]]
            turn += 1
            left = dash[turn % len(dash)]
        piece.append(end)
        left -= distance
    if turn % 2 == 0:
        yield piece
