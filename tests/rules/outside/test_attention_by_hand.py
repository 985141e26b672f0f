"""NTC002."""

from __future__ import annotations

import pytest
import torch

from tilefit.capture import capture
from toys import Attention, LanguageModel, tokens
from whatif import findings, saved_s


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("train", [True, False])
def test_it_is_worth_what_the_fused_model_saves(amp: str, train: bool) -> None:
    by_hand = capture(LanguageModel(fused=False), tokens(), amp=amp, train=train)
    fused = capture(LanguageModel(fused=True), tokens(), amp=amp, train=train)
    (finding,) = findings(by_hand, "NTC002")
    # The layout copies around the fused kernel's gradients, which it does not need, are left in.
    assert 0.85 * saved_s(by_hand, fused) < finding.gain_s < 1.02 * saved_s(by_hand, fused)
    assert finding.module == "blocks.*.attention"
    assert finding.sites == 2
    assert finding.safety == "safe"


def test_weights_that_are_returned_cannot_stay_on_chip() -> None:
    class Returning(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            weights = torch.softmax(q @ k.transpose(-1, -2), -1)
            return (weights @ v).sum() + weights.max()

    x = torch.empty(8, 512, 1024, device="meta")
    assert not findings(capture(Returning(), x, amp="bf16"), "NTC002", min_gain=0)


def test_a_softmax_over_classes_is_not_attention() -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.layer(x), -1)

    x = torch.empty(4096, 1024, device="meta")
    assert not findings(capture(Classifier(), x, amp="bf16"), "NTC002", min_gain=0)
