"""RNN002."""

from __future__ import annotations

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
