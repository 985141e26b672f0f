"""ALN004 and ALN005: channels."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from builders import StepBuilder, resnet
from tilefit.capture import capture
from tilefit.gpus import Gpu
from tilefit.rules import run
from whatif import findings


def test_a_healthy_resnet_is_left_alone(h200: Gpu, a100: Gpu) -> None:
    for gpu in (h200, a100):
        assert run(resnet(), gpu, select=["ALN"]) == []


def test_numbers_that_meet_in_a_convolution_are_one_finding(h200: Gpu) -> None:
    b = StepBuilder(batch=256)
    x = b.conv("a", 64, 150, 56, channels_last=True)
    x = b.conv("b", 150, 300, 56, channels_last=True, x=x)
    b.conv("c", 300, 64, 56, channels_last=True, x=x)
    (found,) = run(b.step(), h200, select=["ALN004"])
    assert found.message == "150 and 300 channels are no multiple of 8 (bf16, 16 bytes) in 3 convolutions"
    assert found.fix.startswith("Use 192 channels instead of 150 and 320 channels instead of 300")


@pytest.mark.parametrize(
    ("between", "batch", "size", "features"),
    [(nn.Flatten(), 4096, 7, "2940 -> 3136"), (nn.AdaptiveAvgPool2d(1), 256, 56, "60 -> 64")],
)
def test_the_layer_behind_the_channels_changes_with_them(
    between: nn.Module, batch: int, size: int, features: str
) -> None:
    convolutions = nn.Conv2d(64, 60, 3, padding=1), nn.ReLU(), nn.Conv2d(60, 60, 3, padding=1), nn.ReLU()
    head = nn.Linear(int(features.split()[0]), 4096)
    model = nn.Sequential(*convolutions, between, nn.Flatten(), head)
    step = capture(model, torch.empty(batch, 64, size, size), amp="bf16", channels_last=True)
    (finding,) = findings(step, "ALN", min_gain=0.0)
    assert finding.code == "ALN004"
    assert f"64 channels instead of 60, in_features of {features}" in finding.fix


def test_grouped_convolutions_are_not_padded(h200: Gpu) -> None:
    b = StepBuilder(batch=64)
    b.conv("depthwise", 60, 60, 56, groups=60, x=b.tensor(64, 60, 56, 56))
    assert run(b.step(), h200, select=["ALN"]) == []


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_first_convolution_gains_nothing_worth_a_finding(channels_last: bool, h200: Gpu) -> None:
    """Measured on an H200 (benchmarks/first_convolution.py): 2 % of the layer with the copy paid."""
    b = StepBuilder(batch=256)
    b.conv("conv1", 3, 64, 224, 7, 2, channels_last=channels_last)
    assert run(b.step(), h200, select=["ALN"]) == []


def test_groups_that_are_normalized_together_are_chosen_before_training() -> None:
    def network(norm: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(64, 60, 3), norm, nn.ReLU(), nn.Conv2d(60, 60, 3))

    x = torch.empty(256, 64, 56, 56, device="meta")
    for norm, safety in ((nn.BatchNorm2d(60), "safe"), (nn.GroupNorm(6, 60), "unsafe")):
        (finding,) = findings(capture(network(norm), x, amp="bf16", channels_last=True), "ALN004")
        assert finding.safety == safety


def test_a_decoder_that_writes_the_image_reads_no_few_channels() -> None:
    decoder = nn.Sequential(
        nn.ConvTranspose2d(256, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1)
    )
    x = torch.empty(128, 256, 56, 56, device="meta")
    step = capture(decoder, x, amp="bf16", channels_last=True)
    assert not findings(step, "ALN005", min_gain=0)


def test_channels_are_padded_where_they_are() -> None:
    video = nn.Conv3d(3, 64, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3))
    (finding,) = findings(
        capture(video, torch.empty(8, 3, 16, 224, 224, device="meta"), amp="bf16"), "ALN005"
    )
    (pad,) = re.findall(r"F\.pad\(x, \(([\d, ]+)\)\)", finding.fix)
    padded = F.pad(torch.empty(8, 3, 16, 224, 224, device="meta"), [*map(int, pad.split(", "))])
    assert padded.shape[1] in (4, 8)
    assert padded.shape[2:] == (16, 224, 224)


def test_channels_whose_convolutions_gain_nothing_are_no_matter_of_alignment() -> None:
    """In NCHW odd channels cost these convolutions nothing, whatever a normalization gains by 32."""
    first, second = nn.Conv3d(1, 30, 3, padding=1), nn.Conv3d(30, 60, 3, stride=2, padding=1)
    model = nn.Sequential(first, nn.BatchNorm3d(30), nn.ReLU(), second, nn.BatchNorm3d(60), nn.ReLU())
    step = capture(model, torch.empty(4, 1, 96, 96, 96, device="meta"), amp="bf16")
    assert not findings(step, "ALN004", gpu="a10", min_gain=0)
