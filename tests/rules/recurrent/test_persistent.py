"""RNN003."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from tilefit.nn import convert
from tilefit.ops import Step
from whatif import findings, saved_s


class Tagger(nn.Module):
    """Two recurrent layers of one size and a readout."""

    def __init__(self, layer: type[nn.RNNBase], hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(hidden, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


def step_of(
    layer: type[nn.RNNBase] = nn.LSTM,
    hidden: int = 1100,
    batch: int = 8,
    *,
    converted: bool = False,
    train: bool = True,
    amp: str = "bf16",
) -> Step:
    model = Tagger(layer, hidden).to("meta")
    x = torch.empty(128, batch, hidden, device="meta")
    return capture(convert(model) if converted else model, x, amp=amp, train=train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_it_is_worth_what_the_converted_model_saves(layer: type[nn.RNNBase], train: bool) -> None:
    before, after = step_of(layer, train=train), step_of(layer, train=train, converted=True)
    (finding,) = findings(before, "RNN003")
    assert finding.sites == 2
    assert finding.module == "layers.*"
    assert finding.safety == "safe"
    assert "tilefit.nn.convert" in finding.fix
    assert ("backward" in finding.arithmetic[0]) == train
    assert finding.gain_s > 0.2 * finding.gain_s / finding.gain_fraction
    assert finding.gain_s == pytest.approx(saved_s(before, after), rel=0.02)


def test_a_converted_model_is_healthy() -> None:
    for code in ("RNN001", "RNN003"):
        assert findings(step_of(hidden=1000), code)
        assert not findings(step_of(hidden=1000, converted=True), code, min_gain=0)


def test_bf16_autocast_changes_the_element_type_and_says_so() -> None:
    (finding,) = findings(step_of(), "RNN003")
    assert "torch.nn computes in fp16" in finding.arithmetic[-1]
    (finding,) = findings(step_of(amp="fp16"), "RNN003")
    assert "torch.nn computes" not in " ".join(finding.arithmetic)


@pytest.mark.parametrize(
    "step",
    [
        step_of(hidden=2048, batch=64),  # cuDNN was measured to be faster in training
        step_of(hidden=4096),  # larger than what was measured
        step_of(amp=""),  # fp32 was not measured
        capture(
            nn.LSTM(512, 512, proj_size=128).to("meta"), torch.empty(128, 8, 512, device="meta"), amp="bf16"
        ),
    ],
    ids=["slower", "large", "fp32", "projection"],
)
def test_what_cudnn_runs_in_tilefit_nn_too_is_left_alone(step: Step) -> None:
    assert not findings(step, "RNN003", min_gain=0)


def test_only_a_gpu_of_the_measured_generation_is_told() -> None:
    step = step_of()
    assert findings(step, "RNN003", gpu="h100-sxm")
    assert not findings(step, "RNN003", gpu="a100-sxm-80gb", min_gain=0)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_layer_is_one_of_inference(frozen: bool) -> None:
    """A GRU of 2560 units fits on the chip without its backward pass."""
    model = Tagger(nn.GRU, 2560).to("meta", torch.bfloat16)
    model.layers.requires_grad_(not frozen)
    step = capture(model, torch.empty(256, 4, 2560, device="meta", dtype=torch.bfloat16))
    found = findings(step, "RNN003", min_gain=0)
    assert bool(found) == frozen
    assert not frozen or "backward" not in found[0].arithmetic[0]
