"""A model with tilefit's recurrent modules is captured as one with torch's, by other kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from capturing import captured, entries
from tilefit.nn import convert
from tilefit.ops import Recurrent


def run(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.rnn(x)[0]


def ragged(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.rnn(x, lengths=torch.full((4,), 9, device=x.device))[0]


def restarted(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.rnn(x, reset=torch.zeros(9, 4, dtype=torch.bool, device=x.device))[0]


X = torch.zeros(9, 4, 24)


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_without_more_arguments_it_is_the_same_operation(layer: type[nn.RNNBase], on_cpu: bool) -> None:
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
    ours = captured(run, X, parts={"rnn": convert(layer(24, 32, **options))}, on_cpu=on_cpu)
    theirs = captured(run, X, parts={"rnn": layer(24, 32, **options)}, on_cpu=on_cpu)
    assert [(e.op, e.phase, e.site.module) for e in entries(ours, Recurrent)] == [
        (replace(e.op, persistent="training"), e.phase, e.site.module) for e in entries(theirs, Recurrent)
    ]
    assert len(entries(ours, Recurrent)) == 3


@pytest.mark.parametrize("function", [ragged, restarted])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_with_them_each_layer_is_one(layer: type[nn.RNNBase], function: Any) -> None:
    rnn = convert(layer(24, 32, 2, bidirectional=True))
    step = captured(function, X, parts={"rnn": rnn}, amp="bf16")
    forward = [entry.op for entry in entries(step, Recurrent, "forward")]
    assert forward == [
        Recurrent(
            mode=rnn.mode,
            input_size=inputs,
            hidden_size=32,
            seq_len=9,
            batch=4,
            bidirectional=True,
            packed=function is ragged,
            dtype="bf16",
            persistent="training",
        )
        for inputs in (24, 64)
    ]
    assert {entry.site.module for entry in entries(step, Recurrent)} == {"rnn"}
    assert (
        len(entries(step, Recurrent, "backward-data"))
        == len(entries(step, Recurrent, "backward-weight"))
        == 2
    )


def test_under_autocast_the_output_has_the_type_of_the_region() -> None:
    """cuDNN computes in fp16 there, and what follows casts that."""
    steps = [
        captured(run, X, parts={"rnn": convert(rnn) if ours else rnn}, amp="bf16")
        for ours, rnn in ((True, nn.GRU(24, 32)), (False, nn.GRU(24, 32)))
    ]
    outputs = [entries(step, Recurrent, "forward")[0].outputs[0].dtype for step in steps]
    assert outputs == ["bf16", "fp16"]
    casts = [[entry.name for entry in step.ops].count("aten._to_copy") for step in steps]
    assert casts[0] <= casts[1]
