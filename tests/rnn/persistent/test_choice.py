"""What was measured is what runs."""

from __future__ import annotations

import pytest

from rnn.persistent.capacities import A100, H200
from tilefit.rnn.cells import CELLS
from tilefit.rnn.persistent import choice
from tilefit.rnn.persistent.choice import chosen, key
from tilefit.rnn.persistent.variant import Problem, Variant, predicted_s, variants


def measured(name: str) -> Problem:
    """The problem that the table has under a name, with full tiles."""
    cell, kernel, bits, hidden, tiles, directions = name.split("/")
    element = "float32" if bits == "32" else "bfloat16"
    sizes = int(hidden), int(tiles) * 8, int(directions)
    return Problem(CELLS[cell], element, *sizes, backward=kernel == "backward")


@pytest.mark.parametrize("name", choice._measured())
def test_every_measured_variant_can_run(name: str) -> None:
    problem = measured(name)
    assert key(problem) == name
    variant = chosen(problem, H200)
    assert variant is not None
    assert choice.entry(variant) == choice._measured()[name]
    assert variant.held <= variant.fragments(problem)
    assert variant.shared_bytes(problem) <= H200.shared_bytes


def test_the_measured_variant_goes_before_the_predicted_one() -> None:
    def predicted(problem: Problem) -> Variant:
        return min(variants(problem, H200), key=lambda variant: predicted_s(problem, variant))

    assert any(predicted(problem) != chosen(problem, H200) for problem in map(measured, choice._measured()))


def test_like_problems_run_the_same_variant() -> None:
    one = Problem(CELLS["lstm"], "bfloat16", 1024, 8)
    for other in (
        Problem(CELLS["lstm"], "float16", 1024, 8),
        Problem(CELLS["lstm"], "bfloat16", 1024, 3),
    ):
        assert chosen(other, H200) == chosen(one, H200)
    ragged = chosen(Problem(CELLS["lstm"], "bfloat16", 1024, 8, lengths=True, resets=True), H200)
    assert ragged is not None
    assert choice._cut(ragged) == choice._cut(chosen(one, H200))
    tanh, relu = (Problem(CELLS[name], "bfloat16", 1024, 8) for name in ("rnn_tanh", "rnn_relu"))
    assert chosen(tanh, H200) == chosen(relu, H200)


def test_as_many_weights_are_held_as_measured_but_where_rows_are_ragged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "gru/forward/16/2048/2/1"
    plain = next(
        v for v in variants(measured(name), H200) if v.rounds == 2 and v.held < v.fragments(measured(name))
    )
    table = {name: choice.entry(plain._replace(held=plain.held + 1))}
    monkeypatch.setattr(choice, "_measured", lambda: table)
    choose = chosen.__wrapped__
    assert choose(measured(name), H200) == plain._replace(held=plain.held + 1)
    for ragged in ({"lengths": True}, {"resets": True}):
        variant = choose(measured(name)._replace(**ragged), H200)
        assert variant is not None
        assert choice._cut(variant) == choice._cut(plain)
        assert variant.held < plain.held


def test_a_gpu_that_cannot_run_the_measured_variant_runs_another() -> None:
    ran = 0
    for name in choice._measured():
        variant = chosen(measured(name), A100)
        assert variant is None or variant.cluster == 1
        ran += variant is not None
    assert ran > 0


def test_nothing_fits_nothing_runs() -> None:
    assert chosen(Problem(CELLS["lstm"], "bfloat16", 8192, 8), H200) is None
