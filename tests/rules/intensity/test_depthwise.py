"""INT002."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from tilefit.ops import Step
from whatif import findings, saved_s


def inverted_bottleneck(channels: int, stride: int, *, fused: bool = False) -> nn.Module:
    wide = 6 * channels

    def normalised(layer: nn.Module) -> list[nn.Module]:
        return [layer, nn.BatchNorm2d(wide), nn.ReLU()]

    if fused:
        expand = normalised(nn.Conv2d(channels, wide, 3, stride=stride, padding=1, bias=False))
    else:
        depthwise = nn.Conv2d(wide, wide, 3, stride=stride, padding=1, groups=wide, bias=False)
        expand = normalised(nn.Conv2d(channels, wide, 1, bias=False)) + normalised(depthwise)
    return nn.Sequential(nn.Conv2d(channels, channels, 1), *expand, nn.Conv2d(wide, channels, 1, bias=False))


def step_of(channels: int, size: int, *, stride: int = 2, fused: bool = False, train: bool = True) -> Step:
    images = torch.empty(128, channels, size, size, device="meta")
    model = inverted_bottleneck(channels, stride, fused=fused)
    return capture(model, images, amp="bf16", channels_last=True, train=train)


@pytest.mark.parametrize("train", [True, False])
def test_an_early_stage_gains_what_the_fused_block_saves(train: bool) -> None:
    before = step_of(16, 112, train=train)
    (finding,) = findings(before, "INT002")
    assert finding.gain_s == pytest.approx(
        saved_s(before, step_of(16, 112, fused=True, train=train)), rel=0.15
    )
    assert finding.module == "4"
    assert finding.safety == "advice"


def test_a_late_stage_would_lose() -> None:
    assert not findings(step_of(320, 7, stride=1), "INT002", min_gain=0)
