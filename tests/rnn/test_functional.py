"""Recurrent layers as functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilefit
from recurrence import CELLS, assert_same, gradients, loop, pair, state, tensors
from tilefit.errors import TilefitError, UsageError
from tilefit.nn import functional

FUNCTIONS: dict[str, Any] = {
    "lstm": functional.lstm,
    "gru": functional.gru,
    "rnn_tanh": functional.rnn,
    "rnn_relu": functional.rnn,
}


@pytest.mark.parametrize("backend", ["reference", "cudnn"])
@pytest.mark.parametrize("cell", CELLS)
def test_functions_are_the_modules(cell: str, backend: str) -> None:
    _, original = pair(cell, 5, 3, 2, bidirectional=True)
    options = {"nonlinearity": "relu"} if cell == "rnn_relu" else {}
    x = torch.randn(6, 4, 5, dtype=torch.float64, requires_grad=True)
    hx, lengths = state(original, 4), torch.tensor([6, 0, 3, 1])
    found = FUNCTIONS[cell](
        x, original.all_weights, hx, bidirectional=True, lengths=lengths, backend=backend, **options
    )
    expected = loop(original, x, hx, lengths)
    assert_same(tensors(*found), tensors(*expected))
    inputs = [x, *tensors(hx), *original.parameters()]
    assert_same(gradients(tensors(*found), inputs), gradients(tensors(*expected), inputs))


def test_dropout_is_for_training() -> None:
    _, original = pair("gru", 4, 3, 2)
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    plain = functional.gru(x, original.all_weights)[0]
    for backend in ("reference", "cudnn"):
        options = {"dropout": 1.0, "backend": backend}
        assert_same([functional.gru(x, original.all_weights, **options)[0]], [plain])
        dropped = functional.gru(x, original.all_weights, training=True, **options)[0]
        assert not torch.allclose(dropped, plain)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (lambda x, ws, h: (x[0], ws, h), {}, "the input is"),
        (lambda x, ws, h: (x[:0], ws, h), {}, "the input is"),
        (lambda x, ws, h: (x, ws, h[:, 0]), {}, "h0 is"),
        (lambda x, ws, h: (x, [], h), {}, "0 sets of weights"),
        (lambda x, ws, h: (x, ws, h), {"bidirectional": True}, r"1 sets of weights for 2"),
        (lambda x, ws, h: (x, [[ws[0][0].t(), *ws[0][1:]]], h), {}, r"weights\[0\]"),
        (lambda x, ws, h: (x, [*ws, [torch.zeros(3, 3)] * 2], h), {}, r"weights\[1\]"),
        (lambda x, ws, h: (x, ws, h), {"nonlinearity": "gelu"}, "nonlinearity"),
    ],
)
def test_sizes_that_do_not_fit(arguments: Any, options: dict[str, Any], message: str) -> None:
    _, original = pair("rnn_tanh", 5, 3)
    x, h = torch.zeros(4, 2, 5, dtype=torch.float64), torch.zeros(1, 2, 3, dtype=torch.float64)
    with pytest.raises(UsageError, match=message):
        functional.rnn(*arguments(x, original.all_weights, h), **options)


def test_a_backend_that_cannot_run() -> None:
    _, original = pair("gru", 5, 3)
    x = torch.zeros(4, 2, 5, dtype=torch.float64)
    with pytest.raises(TilefitError, match="cannot reset"):
        functional.gru(x, original.all_weights, reset=torch.zeros(4, 2), backend="cudnn")


def test_the_namespace() -> None:
    assert tilefit.nn.functional is functional
    assert sorted(tilefit.nn.__all__) == ["GRU", "LSTM", "RNN", "convert", "explain", "functional"]
