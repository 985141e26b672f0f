"""Models are converted in place, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recurrence import CELLS, assert_same
from tilefit.errors import UsageError
from tilefit.nn import convert


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            theirs(6, 6, 2, bidirectional=False, **options) for _, theirs, options in CELLS.values()
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.body:
            x = layer(x)[0]
        return self.head(x)


def test_there_and_back() -> None:
    model = Model().double()
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    parameters, keys, before = list(model.parameters()), list(model.state_dict()), model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []
    model.body[0].register_forward_hook(lambda *_: calls.append(1))

    assert convert(model, backend="reference", recompute=True) is model
    assert [type(layer) for layer in model.body] == [ours for ours, _, _ in CELLS.values()]
    assert all(layer.backend == "reference" and layer.recompute for layer in model.body)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    assert_same([model(x)], [before])
    assert calls
    model(x).sum().backward()
    optimizer.step()
    after = model(x)
    assert not torch.equal(after, before)

    convert(model, back=True)
    assert [type(layer) for layer in model.body] == [theirs for _, theirs, _ in CELLS.values()]
    assert all(vars(layer).keys() == vars(nn.LSTM(1, 1)).keys() for layer in model.body[:2])
    assert_same([model(x)], [after])


def test_a_recurrent_module_itself() -> None:
    layer = nn.GRU(4, 4)
    assert convert(layer) is layer
    assert type(layer) is CELLS["gru"][0]
    convert(layer)  # again changes nothing
    assert type(convert(layer, back=True)) is nn.GRU


def test_a_subclass_may_do_more_and_stays() -> None:
    class Special(nn.LSTM):
        pass

    assert type(convert(Special(4, 4))) is Special


def test_an_unknown_backend() -> None:
    with pytest.raises(UsageError, match="unknown backend"):
        convert(nn.LSTM(4, 4), backend="fast")
