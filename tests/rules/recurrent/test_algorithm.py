"""RNN001."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from tilefit.cost import estimate_step
from tilefit.ops import Step
from whatif import findings, saved_s


class Layers(nn.Module):
    """Recurrent layers one after another."""

    def __init__(self, *layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def step_of(*layers: nn.RNNBase, batch: int = 16, dtype: torch.dtype = torch.float16) -> Step:
    x = torch.empty(256, batch, layers[0].input_size, device="meta", dtype=dtype)
    return capture(Layers(*layers).to(dtype), x, optimizer="none")


def lstm(width: int = 1024, **options: int) -> nn.LSTM:
    return nn.LSTM(width, width, **options)


@pytest.mark.parametrize(
    ("before", "after", "condition", "advice", "safety"),
    [
        (step_of(lstm(), batch=12), step_of(lstm()), "batch 12 is not", "mini-batch to 16", "safe"),
        (step_of(lstm(), dtype=torch.bfloat16), step_of(lstm()), "bf16", "fp16 autocast", "unsafe"),
        (step_of(lstm(1000)), step_of(lstm(1024)), "hidden size 1000", "hidden size 1024", "unsafe"),
        (
            step_of(lstm(512, num_layers=2)),
            step_of(lstm(512), lstm(512)),
            "2 layers",
            "a module per layer",
            "safe",
        ),
    ],
    ids=["batch", "bf16", "hidden", "layers"],
)
def test_the_fewest_changes_are_worth_what_the_changed_layer_saves(
    before: Step, after: Step, condition: str, advice: str, safety: str
) -> None:
    (finding,) = findings(before, "RNN001")
    assert "STANDARD" in finding.message
    assert condition in finding.message
    assert advice in finding.fix
    assert ";" not in finding.fix or condition == "hidden size 1000"
    assert finding.safety == safety
    assert finding.gain_s == pytest.approx(saved_s(before, after), rel=0.05)


def test_a_gru_cannot_be_helped() -> None:
    assert not findings(step_of(nn.GRU(1024, 1024)), "RNN001", min_gain=0)


def test_persistence_that_does_not_pay_is_not_proposed() -> None:
    before, after = step_of(lstm(), batch=128, dtype=torch.bfloat16), step_of(lstm(), batch=128)
    assert estimate_step(after, "h200").gpu_time_s > estimate_step(before, "h200").gpu_time_s
    assert not findings(before, "RNN001", min_gain=0)


def test_a_gpu_without_the_persistent_algorithm_gets_no_advice() -> None:
    assert not findings(step_of(lstm(), batch=12), "RNN001", gpu="t4", min_gain=0)


def test_the_input_that_is_padded_is_the_first_layers() -> None:
    model = Layers(nn.GRU(80, 384, num_layers=3, bidirectional=True)).half()
    step = capture(model, torch.empty(400, 32, 80, device="meta", dtype=torch.float16), optimizer="none")
    (finding,) = findings(step, "RNN001", gpu="v100")
    assert "pad the input to 128 features" in finding.fix
    assert finding.arithmetic[-1].startswith("GRU 128->384")
