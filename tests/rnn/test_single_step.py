"""A single time step by PyTorch's cell functions."""

from __future__ import annotations

import pytest
import torch

from recurrence import assert_same, gradients, loop, pair, state, tensors
from tilefit.errors import TilefitError

BATCH = 3


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2},
        {"num_layers": 2, "bidirectional": True},
        {"batch_first": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "state"])
def test_a_step_is_that_of_torch(cell: str, options: dict[str, object], given: bool) -> None:
    ours, theirs = pair(cell, 5, 4, backend="cell", **options)
    x = torch.randn((BATCH, 1, 5) if ours.batch_first else (1, BATCH, 5), dtype=torch.float64)
    x.requires_grad_()
    hx = state(ours, BATCH) if given else None
    found, expected = tensors(ours(x, hx)), tensors(theirs(x, hx))
    assert ours.explain().backend == "cell"
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert_same(found, expected)
    inputs = [x, *(tensors(hx) if given else [])]
    assert_same(
        gradients(found, [*inputs, *ours.parameters()]), gradients(expected, [*inputs, *theirs.parameters()])
    )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_reset_forgets_the_initial_state(cell: str) -> None:
    ours, _ = pair(cell, 5, 4, backend="cell", num_layers=2, bidirectional=True)
    x, hx = torch.randn(1, BATCH, 5, dtype=torch.float64), state(ours, BATCH)
    reset = torch.tensor([[True, False, True]])
    assert_same(tensors(ours(x, hx, reset=reset)), tensors(loop(ours, x, hx, reset=reset)))


def test_final_states_are_memory_of_their_own() -> None:
    ours, _ = pair("gru", 5, 4, backend="cell")
    with torch.no_grad():
        out, h_n = ours(torch.randn(1, BATCH, 5, dtype=torch.float64))
        kept = out.clone()
        h_n.zero_()
    assert torch.equal(out, kept)


def test_dropout_is_between_layers_in_training_only() -> None:
    ours, theirs = pair("lstm", 5, 64, backend="cell", num_layers=2, dropout=0.5)
    x = torch.randn(1, BATCH, 5, dtype=torch.float64)
    first, second = ours(x)[0], ours(x)[0]
    assert not torch.equal(first, second)
    assert_same([ours.eval()(x)[0]], [theirs.eval()(x)[0]])


def test_autocast_computes_in_its_type() -> None:
    ours, theirs = pair("gru", 5, 4, backend="cell", num_layers=2)
    ours, theirs = ours.float(), theirs.float()
    x = torch.randn(1, BATCH, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out, h_n = ours(x, torch.randn(2, BATCH, 4))
    assert (out.dtype, h_n.dtype) == (torch.bfloat16, torch.bfloat16)


def test_second_derivatives() -> None:
    ours, _ = pair("lstm", 2, 3, backend="cell")
    x = torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ours(x)[0], (x,))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"steps": 2}, "compute a single time step"),
        ({"lengths": torch.tensor([1, 0, 1])}, "have no lengths"),
        ({"proj_size": 2}, "have no projection"),
    ],
    ids=["steps", "lengths", "proj_size"],
)
def test_what_it_cannot_run_is_refused(arguments: dict[str, object], reason: str) -> None:
    steps = arguments.pop("steps", 1)
    lengths = arguments.pop("lengths", None)
    ours, _ = pair("lstm", 5, 4, backend="cell", **arguments)
    with pytest.raises(TilefitError, match=reason):
        ours(torch.randn(steps, BATCH, 5, dtype=torch.float64), lengths=lengths)


def test_plain_rnns_are_refused() -> None:
    ours, _ = pair("rnn_tanh", 5, 4, backend="cell")
    with pytest.raises(TilefitError, match="make larger errors than cuDNN"):
        ours(torch.randn(1, BATCH, 5, dtype=torch.float64))


def test_compiled_code_refuses_it() -> None:
    ours, _ = pair("gru", 5, 4, backend="cell")
    compiled = torch.compile(ours, backend="eager")
    with pytest.raises(TilefitError, match="does not call PyTorch's cell functions"):
        compiled(torch.randn(1, BATCH, 5, dtype=torch.float64))
