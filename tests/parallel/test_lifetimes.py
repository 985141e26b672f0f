"""What a rank holds, by hand."""

from __future__ import annotations

import pytest

from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Collective, Gemm, Op, Site, StepOp, Streaming
from tilefit.ops.collective import ALL_REDUCE
from tilefit.ops.entries import TensorRef
from tilefit.parallel.lifetimes import Lifetimes

UP, DOWN = (64, 32), (32, 64)
TOKENS = 1000
NARROW, WIDE = 32 * 2 * TOKENS, 64 * 2 * TOKENS
#: Norm, product, activation, product; then what follows hands back the gradient of their result.
BLOCK, BACKWARD = range(4), range(5, 10)


def made(number: int, width: int) -> TensorRef:
    return TensorRef(number, (TOKENS, width), "bf16")


def lifetimes(parts: dict[int, int] | None = None, *, again: bool = False, summed: bool = False) -> Lifetimes:
    norm, up, act, down = made(1, 32), made(2, 64), made(3, 64), made(4, 32)
    d_down, d_act, d_up, d_norm = made(5, 32), made(6, 64), made(7, 64), made(8, 32)
    stream, product = Streaming("pointwise", 1, 1, 1), Gemm(TOKENS, 64, 32)
    calls: list[tuple[Op, str, list[TensorRef], list[TensorRef]]] = [
        (stream, FORWARD, [], [norm]),
        (product, FORWARD, [norm], [up]),
        (stream, FORWARD, [up], [act]),
        (product, FORWARD, [act], [down]),
        (stream, BACKWARD_DATA, [down], [d_down]),
        (product, BACKWARD_DATA, [d_down], [d_act]),
        (product, BACKWARD_WEIGHT, [d_down, act], [TensorRef(9, DOWN, "bf16")]),
        (stream, BACKWARD_DATA, [d_act, up], [d_up]),
        (product, BACKWARD_DATA, [d_up], [d_norm]),
        (product, BACKWARD_WEIGHT, [d_up, norm], [TensorRef(10, UP, "bf16")]),
    ]
    if summed:
        calls[7] = Collective(ALL_REDUCE, TOKENS * 64, 2, "bf16"), BACKWARD_DATA, [d_act], [d_act]
    entries = [StepOp(op, phase, Site("a"), "", tuple(i), tuple(o)) for op, phase, i, o in calls]
    return Lifetimes(entries, {UP, DOWN}, parts or {}, again)


def test_what_the_backward_pass_reads_is_kept_and_more_is_held_while_it_runs() -> None:
    held = lifetimes()
    # The result is read by what follows, and belongs to this block all the same.
    assert held.kept(BLOCK) == {1: NARROW, 2: WIDE, 3: WIDE, 4: NARROW}
    # Fullest is the first product: with the gradient handed back and the one it makes.
    assert held.surplus([*BLOCK, *BACKWARD]) == NARROW + WIDE - NARROW
    assert held.surplus(BLOCK) == 0


def test_a_forward_pass_that_holds_more_for_a_moment_counts() -> None:
    # A loss that casts logits, subtracts from the cast, and works in place from there on.
    logits, cast, shares = made(1, 32), TensorRef(2, (TOKENS, 32), "fp32"), TensorRef(3, (TOKENS, 32), "fp32")
    stream = Streaming("pointwise", 1, 1, 1)
    calls = [
        (FORWARD, [], [logits]),
        (FORWARD, [logits], [cast]),
        (FORWARD, [cast], [shares]),
        (BACKWARD_DATA, [shares], [shares]),
        (BACKWARD_DATA, [shares], [made(4, 32)]),
    ]
    entries = [StepOp(stream, phase, Site("a"), "", tuple(i), tuple(o)) for phase, i, o in calls]
    held = Lifetimes(entries, set(), {}, False)
    assert held.kept(range(5)) == {3: 2 * NARROW}
    # The cast and the shares, four and four bytes; the backward pass has four and two.
    assert held.surplus(range(5)) == 4 * NARROW - 2 * NARROW


def test_a_sum_of_ranks_is_written_beside_what_it_sums_up() -> None:
    # When the first product has been read back, its operand and the gradient handed back are gone.
    assert lifetimes(summed=True).surplus([*BLOCK, *BACKWARD]) == pytest.approx(WIDE)


@pytest.mark.parametrize(("again", "parts"), [(True, 4), (False, 1)])
def test_what_ranks_gather_for_a_product_is_kept_whole_where_it_is_not_gathered_again(
    again: bool, parts: int
) -> None:
    assert lifetimes({0: 4}, again=again).kept(BLOCK)[1] == NARROW // parts
