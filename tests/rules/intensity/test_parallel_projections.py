"""INT004."""

from __future__ import annotations

import pytest

from tilefit.capture import capture
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


def test_layers_in_sequence_are_not_parallel() -> None:
    from torch import nn

    chain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    assert not findings(capture(chain, tokens(64, 512).float(), amp="bf16"), "INT004", min_gain=0)
