"""NTC002."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize(
    "attend",
    [
        lambda scores, v: torch.softmax(50 * torch.tanh(scores / 50), -1) @ v,
        lambda scores, v: torch.softmax(scores, -2) @ v,
        lambda scores, v: (torch.softmax(scores, -1) * torch.sigmoid(scores)) @ v,
        lambda scores, v: torch.softmax(scores * scores, -1) @ v,
        lambda scores, v: (weights := torch.softmax(scores, -1), weights @ v),
        lambda scores, v: torch.softmax(scores, -1).masked_fill(scores.new_zeros((), dtype=bool), 0) @ v,
        lambda scores, v: torch.softmax(scores.masked_fill(scores < scores.mean(-1, True), -1e9), -1) @ v,
    ],
    ids=["soft cap", "over the queries", "gated", "squared", "returned", "masked after", "masked by scores"],
)
@pytest.mark.parametrize("train", [True, False])
def test_what_no_fused_kernel_does_is_left_alone(
    attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], train: bool
) -> None:
    class Attending(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x).unflatten(-1, (16, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return attend(q @ k.transpose(-1, -2), v)

    x = torch.empty(8, 512, 1024, device="meta")
    step = capture(Attending(), x, amp="bf16", train=train, loss=_last_mean)
    assert not findings(step, "NTC002", min_gain=0)


def _last_mean(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (output[-1] if isinstance(output, tuple) else output).mean()


class Block(nn.Module):
    """PyTorch's own module, asked for its weights or not."""

    def __init__(self, returned: slice = slice(0, 1), **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(512, 8, batch_first=True)
        self.returned, self.options = returned, options

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.attention(x, x, x, **self.options)[self.returned]


@pytest.mark.parametrize("train", [True, False])
def test_weights_that_nobody_reads_need_not_be_returned(train: bool) -> None:
    x = torch.empty(8, 512, 512, device="meta")
    asked = capture(Block(), x, amp="bf16", train=train)
    spared = capture(Block(need_weights=False), x, amp="bf16", train=train)
    (finding,) = findings(asked, "NTC002")
    assert "need_weights=False" in finding.fix
    # The query that is scaled by an operation of its own is left so.
    assert 0.6 * saved_s(asked, spared) < finding.gain_s < 1.05 * saved_s(asked, spared)
    assert not findings(spared, "NTC002", min_gain=0)
    assert not findings(capture(Block(slice(0, 2)), x, amp="bf16", train=train), "NTC002", min_gain=0)


def test_a_softmax_over_classes_is_not_attention() -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.layer(x), -1)

    x = torch.empty(4096, 1024, device="meta")
    assert not findings(capture(Classifier(), x, amp="bf16"), "NTC002", min_gain=0)
