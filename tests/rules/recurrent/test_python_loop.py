"""RNN002."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from toys import Loop
from whatif import findings, saved_s

X = torch.empty(64, 16, 256, device="meta")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("amp", ["", "fp16"])
def test_a_loop_is_worth_what_the_layer_saves(layer: type[nn.RNNBase], train: bool, amp: str) -> None:
    loop = capture(Loop(layer), X, train=train, amp=amp, tf32=False, optimizer="none")
    whole = capture(Loop(layer, looped=False), X, train=train, amp=amp, tf32=False, optimizer="none")
    (finding,) = findings(loop, "RNN002")
    assert "64 time steps" in finding.message
    assert f"nn.{layer.__name__}" in finding.fix
    # The rule leaves what surrounds the cell (the stacking of the outputs) as it is.
    assert 0.9 * saved_s(loop, whole) < finding.gain_s < 1.05 * saved_s(loop, whole)
    assert not findings(loop, "INT005", min_gain=0), "the loop as a whole is one finding"


def test_a_cell_that_no_layer_computes_is_left_alone() -> None:
    model = Loop(nn.LSTM)
    model.norm = nn.LayerNorm(256)
    assert not findings(capture(model, X), "RNN002", min_gain=0)


class ByHand(nn.Module):
    """A cell written by hand: ``between`` makes its next state, of two parts, of gates and the last one."""

    def __init__(self, gates: int, between: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.gates, self.between = gates, between
        self.ih, self.hh = nn.Linear(256, gates * 256), nn.Linear(256, gates * 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(2, *x.shape[1:]).unbind()
        outputs = []
        for step in x:
            gates = self.ih(step).chunk(self.gates, -1), self.hh(state[0]).chunk(self.gates, -1)
            state = self.between(*gates, *state, step)
            outputs.append(state[0])
        return torch.stack(outputs)


def lstm(a, b, h, c, x, *, last=torch.tanh, peephole=0.0):  # type: ignore[no-untyped-def]
    i, f, g, o = (first + second for first, second in zip(a, b, strict=True))
    if peephole:
        f = f + peephole * c
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * last(c), c


def gru(a, b, h, c, x):  # type: ignore[no-untyped-def]
    r, z = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
    return (1 - z) * torch.tanh(a[2] + r * b[2]) + z * h, c


def vanilla(a, b, h, c, x):  # type: ignore[no-untyped-def]
    return torch.tanh(a[0] + b[0]), c


def reset(cell):  # type: ignore[no-untyped-def]
    """At the end of an episode the state is cleared, as in reinforcement learning."""
    return lambda a, b, h, c, x: tuple(each * x[:, :1] for each in cell(a, b, h, c, x))


def residual(cell):  # type: ignore[no-untyped-def]
    def added(a, b, h, c, x):  # type: ignore[no-untyped-def]
        h, c = cell(a, b, h, c, x)
        return h + x, c

    return added


@pytest.mark.parametrize(("gates", "cell", "name"), [(4, lstm, "LSTM"), (3, gru, "GRU"), (1, vanilla, "RNN")])
def test_a_cell_by_hand_is_told_from_one_that_does_something_else(
    gates: int, cell: Callable[..., tuple[torch.Tensor, torch.Tensor]], name: str
) -> None:
    (finding,) = findings(capture(ByHand(gates, cell), X[:16]), "RNN002")
    assert f"nn.{name} " in finding.fix
    for other in (reset(cell), residual(cell)):
        assert not findings(capture(ByHand(gates, other), X[:16]), "RNN002", min_gain=0)


@pytest.mark.parametrize("other", [{"last": torch.relu}, {"last": lambda c: c}, {"peephole": 0.5}])
def test_other_lstms_are_none_of_pytorchs(other: dict[str, Any]) -> None:
    assert not findings(capture(ByHand(4, partial(lstm, **other)), X[:16]), "RNN002", min_gain=0)


def test_a_cells_state_that_is_cleared_is_left_alone() -> None:
    class Cleared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(256, 256)

        def forward(self, x: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
            state = x.new_zeros(2, *x.shape[1:]).unbind()
            for step, end in zip(x, ended, strict=True):
                state = self.cell(step, tuple(each * end for each in state))
            return state[0]

    inputs = (X[:16], torch.empty(16, 16, 1, device="meta"))
    assert not findings(capture(Cleared(), inputs), "RNN002", min_gain=0)


def test_feedback_from_the_output_is_left_alone() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(256, 256)
            self.out = nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = token = x[0]
            for _ in range(16):
                state = self.cell(token, state)
                token = self.out(state)
            return token

    assert not findings(capture(Decoder(), X), "RNN002", min_gain=0)


def test_a_shared_layer_is_no_recurrent_cell() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(12):
                x = x + self.down(torch.tanh(self.up(x)).sigmoid())
            return x

    assert not findings(capture(Shared(), X[0]), "RNN002", min_gain=0)
