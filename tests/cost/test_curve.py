from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import gpt2
from tilefit import gpus
from tilefit.cli.curve_sizes import STEP_DENSITY, sizes_between
from tilefit.cost import estimate, estimate_step
from tilefit.cost.curve import Curve, curve, knee, linear, step_curve
from tilefit.cost.estimate import Estimate
from tilefit.errors import TilefitError, UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Gemm, Memory, Op, Step

H200 = gpus.get("h200")


def over_n(first: int, last: int, step: int | None = None, layout: str = "TN") -> Curve:
    return curve(
        layout, lambda n: (Gemm(8192, n, 4096, layout=layout),), sizes_between(first, last, step), H200
    )


@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_sizes_increase_from_the_first_within_the_range_and_are_not_too_many(first: int, more: int) -> None:
    sizes = sizes_between(first, first + more)
    assert sizes[0] == first
    assert sizes[-1] <= first + more
    assert all(a < b for a, b in pairwise(sizes))
    assert len(sizes) <= 1600


def test_a_short_range_has_all_its_sizes_and_a_step_its_multiples() -> None:
    assert sizes_between(50200, 50400) == tuple(range(50200, 50401))
    assert sizes_between(1, 100, 25) == (1, 25, 50, 75, 100)
    assert sizes_between(64, 64) == (64,)


def test_a_long_range_shows_every_doubling_and_the_powers_of_two() -> None:
    sizes = set(sizes_between(1, 65536))
    assert set(range(1, 129)) <= sizes
    assert {2**power for power in range(17)} <= sizes


@pytest.mark.parametrize(("first", "last", "step"), [(9, 8, None), (9, 8, 2), (1, 10**9, 1)])
def test_a_range_that_is_reversed_or_endless_is_refused(first: int, last: int, step: int | None) -> None:
    with pytest.raises(UsageError) as refused:
        sizes_between(first, last, step)
    assert refused.value.hint


def test_points_are_the_estimates() -> None:
    found = over_n(64, 70)
    for point in found.points:
        product = Gemm(8192, point.size, 4096)
        assert point.time_s == estimate(product, H200).time_s
        assert point.flop_per_s == product.flop / point.time_s


def test_misaligned_sizes_are_dips_with_the_aligned_one_that_follows() -> None:
    found = over_n(4080, 4096)
    slow = {point.size: dip for dip in found.dips for point in dip.points}
    assert set(slow) == {n for n in range(4080, 4097) if n % 8}
    assert all(dip.better.size % 8 == 0 and dip.better.size > size for size, dip in slow.items())
    assert all(dip.speedup > 1.05 for dip in found.dips)


def test_a_better_size_beyond_the_range_or_between_its_steps_is_found() -> None:
    assert over_n(4090, 4091).dips[-1].better.size >= 4096
    assert all(dip.better.size % 8 == 0 for dip in over_n(4000, 4100, 25).dips)


def test_aligned_sizes_have_no_dips() -> None:
    assert over_n(4096, 8192, 256).dips == ()


def test_rows_fill_tiles_so_the_rate_steps_down_after_a_full_one() -> None:
    found = curve("TN", lambda m: (Gemm(m, 4096, 4096),), sizes_between(100, 300), gpus.get("a100"))
    assert {128, 256} & {point.size for point in found.steps}
    assert not {point.size for point in found.steps} & {101, 120, 200}


def test_the_knee_is_the_smallest_at_95_percent_of_the_best() -> None:
    assert knee({1: 10.0, 2: 94.0, 4: 95.0, 8: 100.0, 16: 99.0}) == 4


def test_the_curve_s_knee_is_named_only_where_the_range_holds_it() -> None:
    rows = lambda m: (Gemm(m, 4096, 4096),)  # noqa: E731
    wide = curve("TN", rows, sizes_between(64, 32768), H200)
    assert wide.knee is not None
    assert wide.knee.flop_per_s >= 0.95 * wide.best.flop_per_s
    assert curve("TN", rows, sizes_between(1, 64), H200).knee is None
    assert curve("TN", rows, sizes_between(8192, 8200), H200).knee is None


def test_a_linear_layer_is_three_products_in_training_and_one_in_inference() -> None:
    forward, data, weight = linear(256, 768, 3072, "bf16", train=True)
    assert (forward.m, forward.n, forward.k, forward.layout) == (256, 3072, 768, "TN")
    assert (data.m, data.n, data.k, data.layout) == (256, 768, 3072, "NN")
    assert (weight.m, weight.n, weight.k, weight.layout) == (3072, 768, 256, "NT")
    assert linear(256, 768, 3072, "bf16", train=False) == (forward,)
    (point,) = curve("layer", lambda out: linear(256, 768, out, "bf16", train=True), (3072,), H200).points
    assert point.time_s == pytest.approx(sum(estimate(op, H200).time_s for op in (forward, data, weight)))


def test_a_step_s_sizes_are_fewer_but_a_short_range_has_them_all() -> None:
    sizes = sizes_between(1, 1024, density=STEP_DENSITY)
    assert set(range(1, 33)) <= set(sizes)
    assert {64, 128, 256, 512, 1024} <= set(sizes)
    assert len(sizes) < 300
    assert sizes_between(50200, 50400, density=STEP_DENSITY) == tuple(range(50200, 50401))


def over_batch(sizes: Iterable[int], **options: object) -> Curve:
    """A step whose memory grows by a gigabyte a sample."""

    def at(batch: int) -> Step:
        return replace(gpt2(batch=batch), memory=Memory(peak_bytes=batch << 30))

    arguments = {"over": "batch", "everywhere": True} | options
    return step_curve("step", at, tuple(sizes), H200, **arguments)  # type: ignore[arg-type]


def test_a_step_s_points_are_its_estimates_with_throughput_and_memory() -> None:
    found = over_batch((8, 16))
    for point in found.points:
        total = estimate_step(gpt2(batch=point.size), H200)
        assert (point.time_s, point.low_s, point.high_s) == (total.time_s, total.low_s, total.high_s)
        assert point.items_per_s == point.size / total.time_s
        assert point.memory_bytes == point.size << 30
    assert (found.unit, found.provenance) == ("samples", "estimated")


def test_over_the_sequence_tokens_are_counted() -> None:
    found = step_curve(
        "step", lambda seq: gpt2(batch=4, seq=seq), (64, 128), H200, over="seq", everywhere=False
    )
    assert found.unit == "tokens"
    assert [point.items for point in found.points] == [256, 512]


def test_sizes_that_exceed_the_memory_are_left_out_and_named() -> None:
    found = over_batch((100, 120, 160, 200))
    assert [point.size for point in found.points] == [100, 120]
    assert found.too_large == (160, 200)
    with pytest.raises(TilefitError, match="at batch 160 the step needs 160 GiB"):
        over_batch((160, 200))


def test_a_vocabulary_s_next_efficient_size_for_the_whole_step() -> None:
    found = step_curve(
        "step", lambda n: gpt2(vocabulary=n), (50256, 50257, 50258), H200, over="vocab", everywhere=True
    )
    (dip,) = found.dips
    assert [point.size for point in dip.points] == [50257, 50258]
    assert dip.better.size in (50264, 50304)
    alone = step_curve(
        "step", lambda n: gpt2(vocabulary=n), (50257, 50259), H200, over="vocab", everywhere=False
    )
    assert alone.dips == (), "sizes that were not captured are not promised"


def test_measured_prices_make_a_measured_curve_of_the_measured_sizes() -> None:
    def prices(ops: Iterable[Op], gpu: Gpu) -> list[Estimate]:
        return [Estimate(2e-3, 1e-3, 3e-3, "math", provenance="measured") for _ in ops]

    sizes = (4090, 4096)
    found = curve("TN", lambda n: (Gemm(8, n, 8),), sizes, H200, prices)
    assert [(p.size, p.time_s, p.low_s, p.high_s) for p in found.points] == [
        (n, 2e-3, 1e-3, 3e-3) for n in sizes
    ]
    assert (found.provenance, found.dips) == ("measured", ())
    step = over_batch((8, 16), prices=prices)
    assert step.provenance == "measured"
    assert step.points[0].time_s >= 2e-3 * len(gpt2(batch=8).ops)
