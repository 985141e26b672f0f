from __future__ import annotations

import pytest

from tilefit.errors import TilefitError, UsageError
from tilefit.sweep.axes import Axis, points, read_axes


def values(text: str) -> tuple[int | str, ...]:
    (axis,) = read_axes([text])
    return axis.values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch=1..16", (1, 2, 4, 8, 16)),
        ("batch=3..20", (3, 4, 8, 16, 20)),
        ("batch=7..7", (7,)),
        ("seq=512..1024:256", (512, 768, 1024)),
        ("seq=500..1024:256", (500, 512, 768, 1024)),
        ("hidden=1024,768,768", (768, 1024)),
        ("batch=1..4, 6,24", (1, 2, 4, 6, 24)),
        ("amp=off,bf16", ("off", "bf16")),
        ("channels-last=on", ("on",)),
        ("gpu=h200,h200-sxm,l4", ("h200", "l4")),
    ],
)
def test_values(text: str, expected: tuple[int | str, ...]) -> None:
    assert values(text) == expected


@pytest.mark.parametrize(
    ("texts", "message", "hint"),
    [
        (["batch"], "cannot read --over batch", "batch=1..512"),
        (["batch="], "cannot read --over batch=", "NAME=VALUES"),
        (["batch=0..4"], "'0..4' is neither a size nor a range", "from 1 on"),
        (["batch=1:4"], "'1:4' is neither", "FIRST..LAST"),
        (["batch=-3"], "'-3' is neither", "from 1 on"),
        (["batch=9..3"], "reversed", "3..9"),
        (["batch=1", "batch=2"], "batch varies twice", "one --over batch"),
        (["amp=bf15"], "amp cannot be 'bf15'", "bf16"),
        (["batch=1..100000:1"], "more than 5,000 sizes", "larger step"),
    ],
)
def test_what_is_refused_says_what_to_write(texts: list[str], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_axes(texts)
    assert message in refused.value.what
    assert hint in refused.value.hint


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(TilefitError, match="h300"):
        read_axes(["gpu=h300"])


def test_a_grid_of_too_many_points_is_refused_before_anything_is_captured() -> None:
    axes = [Axis("batch", tuple(range(1, 1001))), Axis("seq", tuple(range(1, 7)))]
    with pytest.raises(UsageError, match="1000 of batch x 6 of seq are 6,000 points"):
        points(axes)
    assert points(axes[:1]) == 1000
