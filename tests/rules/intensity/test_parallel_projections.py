"""INT004."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from tilefit.ops import Step
from toys import LanguageModel, tokens
from whatif import findings, saved_s


@pytest.mark.parametrize("train", [True, False])
def test_merging_is_worth_what_the_merged_model_saves(train: bool) -> None:
    apart = capture(LanguageModel(), tokens(), amp="bf16", train=train)
    merged = capture(LanguageModel(merged=True), tokens(), amp="bf16", train=train)
    (finding,) = findings(apart, "INT004")
    assert finding.gain_s == pytest.approx(saved_s(apart, merged), rel=0.15)
    assert finding.module == "blocks.*.attention"
    assert finding.sites == 2
    assert finding.safety == "safe"
    assert finding.message.startswith("q, k, v ")


class Pair(nn.Module):
    """Two layers beside each other."""

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        self.inputs = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (chosen(x) for chosen in self.inputs)
        return self.a(first) * self.b(second)


def test_slices_of_one_memory_are_not_one_input() -> None:
    x = torch.empty(2, 4096, 1024, device="meta")
    same = capture(Pair(itemgetter(0), itemgetter(0)), x, amp="bf16")
    other = capture(Pair(itemgetter(0), itemgetter(1)), x, amp="bf16")
    assert findings(same, "INT004")
    assert not findings(other, "INT004", min_gain=0)
    assert not findings(Step.from_json(other.to_json()), "INT004", min_gain=0)


def test_a_layer_that_is_trained_is_not_merged_with_one_that_is_not() -> None:
    pair = Pair(itemgetter(0), itemgetter(0))
    pair.b.weight.requires_grad_(False)
    step = capture(pair, torch.empty(1, 4096, 1024, device="meta"), amp="bf16")
    assert not findings(step, "INT004", min_gain=0)


def test_layers_in_sequence_are_not_parallel() -> None:
    chain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    assert not findings(capture(chain, tokens(64, 512).float(), amp="bf16"), "INT004", min_gain=0)


def test_weights_of_one_module_go_by_their_names() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = (nn.Parameter(torch.empty(1024, 1024)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.up) * torch.sigmoid(x @ self.gate)

    x = torch.empty(8192, 1024, device="meta")
    (alone,) = findings(capture(Gated(), x, amp="bf16"), "INT004")
    assert alone.message.startswith("up, gate multiply")
    (nested,) = findings(capture(nn.Sequential(Gated(), Gated()), x, amp="bf16"), "INT004")
    assert (nested.message, nested.module, nested.sites) == (alone.message, "*", 2)


def test_a_cells_own_weights_are_not_merged_with_a_layer_beside_it() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(256, 256), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = x.new_zeros(2, *x.shape[1:]).unbind()
            scores = []
            for step in x:
                state = self.cell(step, state)
                scores.append(self.head(state[0]))
            return torch.stack(scores)

    assert not findings(capture(Tagger(), torch.empty(16, 32, 256, device="meta")), "INT004", min_gain=0)
