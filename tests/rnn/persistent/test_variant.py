"""Every way to cut a kernel fits the chip and does the whole work once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnn.persistent.capacities import A100, H200
from tilefit.rnn.cells import CELLS
from tilefit.rnn.persistent.variant import (
    REGISTERS,
    SHARED_BYTES,
    THREAD_REGISTERS,
    Capacity,
    Problem,
    predicted_s,
    variants,
)

#: A problem has up to thousands of variants: they take longer than Hypothesis allows, and are many cases.
patiently = settings(deadline=None, max_examples=40)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    element = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    piece = 4 if element == "float32" else 8
    return Problem(
        CELLS[draw(st.sampled_from(sorted(CELLS)))],
        element,
        piece * draw(st.integers(1, 2304 // piece)),
        draw(st.integers(1, 128)),
        draw(st.sampled_from([1, 2])),
        draw(st.booleans()),
    )


@patiently
@given(problems(), st.sampled_from([H200, A100]))
def test_every_variant_fits_the_chip(problem: Problem, capacity: Capacity) -> None:
    for variant in variants(problem, capacity):
        assert variant.shared_bytes(problem) <= SHARED_BYTES
        assert variant.warps * 32 <= 1024
        accumulators = 4 * variant.row_tiles(problem) * variant.tiles
        registers = 8 * variant.held + accumulators + 4 * variant.window
        assert registers < min(THREAD_REGISTERS, REGISTERS // (variant.warps * 32))
        assert variant.grid(problem) <= capacity.multiprocessors
        clusters = variant.grid(problem) / variant.cluster
        assert variant.cluster == 1 or clusters <= capacity.clusters[variant.cluster - 2]


@patiently
@given(problems())
def test_every_unit_row_and_slab_has_its_place(problem: Problem) -> None:
    for variant in variants(problem, H200):
        assert variant.blocks % variant.split == 0
        assert variant.blocks * variant.units >= problem.hidden
        assert (variant.blocks - variant.split) * variant.units < problem.hidden  # no cluster is idle
        rows = variant.rows(problem)
        assert (variant.batch_groups - 1) * rows < problem.batch <= variant.batch_groups * rows  # nor a group
        round_rows = variant.tiles * 8
        assert (variant.rounds - 1) * round_rows < rows <= variant.rounds * round_rows  # nor a round
        depth = variant.slabs(problem) * variant.split * variant.warps * 64 // problem.element_bytes
        assert depth >= problem.depth
        assert variant.row_tiles(problem) * 16 >= variant.split * variant.units * problem.rows_per_unit
        assert 0 <= variant.held <= variant.fragments(problem)
        assert 1 <= variant.window <= variant.slabs(problem) * variant.tiles


@patiently
@given(problems())
def test_what_the_kernel_takes_for_granted(problem: Problem) -> None:
    for variant in variants(problem, H200):
        constants = variant.constants(problem)
        assert constants["HIDDEN"] * problem.element_bytes % 16 == 0
        assert constants["UNITS"] % 2 == 0  # two 16-bit results are published in one word
        assert constants["SPLIT"] == 1 or constants["UNITS"] * problem.rows_per_unit % 8 == 0
        if constants["MAIL"]:
            assert constants["SPLIT"] == 1
            assert constants["BLOCKS"] <= 16
            assert constants["UNITS"] * problem.element_bytes % 16 == 0  # results are sent in pieces
        assert constants["JITTER"] == 0
        assert predicted_s(problem, variant) > 0


@patiently
@given(problems())
def test_only_several_rounds_copy_ahead(problem: Problem) -> None:
    for variant in variants(problem, H200):
        if variant.ahead:
            assert variant.rounds > 1
            assert not variant.mail
            later = variant._replace(ahead=0)
            pieces = variant.slabs(problem) * variant.tiles * variant.warps * 32
            assert variant.shared_bytes(problem) - later.shared_bytes(problem) == pieces * 16


@patiently
@given(problems())
def test_a_small_mini_batch_can_be_split_into_single_rows(problem: Problem) -> None:
    found = {(variant.batch_groups, variant.rows(problem)) for variant in variants(problem, H200)}
    if problem.batch <= 4 and problem.hidden <= 256 and problem.directions == 1 and found:
        assert (problem.batch, 1) in found


@patiently
@given(problems())
def test_without_clusters_blocks_exchange_through_the_l2_cache(problem: Problem) -> None:
    assert all((variant.split, variant.mail) == (1, False) for variant in variants(problem, A100))


@pytest.mark.parametrize("backward", [False, True])
def test_weights_too_large_for_the_chip_have_no_variant(backward: bool) -> None:
    def fits(hidden: int) -> bool:
        problem = Problem(CELLS["lstm"], "bfloat16", hidden, 8, backward=backward)
        return any(True for _ in variants(problem, H200))

    # 4 * 2304 * 2304 bfloat16 are 42 MB; an H200 has 33 MB of registers and 29 MB of shared memory.
    assert fits(1024)
    assert not fits(4096)


def test_predictions_order_sizes() -> None:
    def best(hidden: int, batch: int) -> float:
        problem = Problem(CELLS["lstm"], "bfloat16", hidden, batch)
        return min(predicted_s(problem, variant) for variant in variants(problem, H200))

    assert best(256, 8) < best(1024, 8) < best(1024, 64)
