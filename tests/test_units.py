"""Quantities as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilefit import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (9.996, "10.0"), (99.96, "100"), (12345, "12,300")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert units.number(value) == text


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_a_number_is_off_by_half_a_unit_of_its_third_digit_at_most(value: float) -> None:
    assert float(units.number(value).replace(",", "")) == pytest.approx(value, rel=5.001e-3)
    assert "e" not in units.number(value)


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 ns"),
        (2.5e-7, "250 ns"),
        (0.0123, "12.3 ms"),
        (0.99961, "1.00 s"),
        (0.9994, "999 ms"),
        (90, "90.0 s"),
    ],
)
def test_times(time_s: float, text: str) -> None:
    assert units.seconds(time_s) == text


def test_an_interval_has_one_unit() -> None:
    assert units.interval(0.0009, 0.0015) == "0.900 to 1.50 ms"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0, "0 %"),
        (0.0001, "<0.1 %"),
        (0.1639, "16.4 %"),
        (0.99999, "99.9 %"),
        (1, "100 %"),
        (1.25, "125.0 %"),
        (-0.05, "-5.0 %"),
    ],
)
def test_shares(fraction: float, text: str) -> None:
    assert units.share(fraction) == text


def test_bytes_moved_are_decimal_and_bytes_held_binary() -> None:
    assert units.size(150e9) == "150 GB"
    assert units.capacity(150e9) == "140 GiB"
    assert units.capacity(512) == "512 B"


def test_rates_and_counts() -> None:
    assert units.rate(989.4e12) == "989 TFLOP/s"
    assert units.flop(2.5e15) == "2.50 PFLOP"
    assert units.count(1482) == "1,482"
    assert units.count(124_439_808) == "124 M"


def test_how_many() -> None:
    assert [units.counted(many, "row") for many in (0, 1, 2, 1482)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1,482 rows",
    ]
