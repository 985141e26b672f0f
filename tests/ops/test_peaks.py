"""A few moments stand for all of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilefit.ops.peaks import fullest

sizes = st.integers(0, 1000)


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=30), st.integers(1, 5000))
def test_the_fullest_moments_are_as_full_as_all_on_every_batch(
    moments: list[tuple[int, int]], hundredths: int
) -> None:
    def peak(of: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> int:
        return max(100 * stays + hundredths * grows for stays, grows in of)

    assert peak(fullest(moments)) == peak(moments)


def test_what_is_never_the_fullest_is_left_out() -> None:
    assert fullest([(10, 0), (0, 10), (4, 4), (9, 0), (0, 9)]) == ((10, 0), (0, 10))
    assert fullest([(stays, 100 - stays) for stays in range(101)]) == ((100, 0), (0, 100))
    assert fullest([(10, 5), (10, 5)]) == ((10, 5),)
