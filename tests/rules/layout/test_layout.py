"""LAY: formats, copies, operand layouts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from builders import StepBuilder, gpt2, resnet
from tilefit import gpus
from tilefit.capture import capture
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.rules import run
from whatif import findings, saved_s


def test_nchw_convolutions_are_turned(h200: Gpu, a100: Gpu) -> None:
    for gpu in (h200, a100):
        (finding,) = run(resnet(channels_last=False), gpu, select=["LAY"])
        assert finding.code == "LAY001"
        assert "torch.channels_last" in finding.fix
        assert finding.safety == "safe"
        assert finding.severity == "warning"


def test_what_is_saved_is_accounted_for_in_one_line(h200: Gpu) -> None:
    b = StepBuilder(batch=256, training=False)
    x, y = b.tensor(256, 64, 56, 56), b.tensor(256, 64, 56, 56)
    b.conv("conv", 64, 64, 56, channels_last=False, x=x)
    b.stream("norm", "normalization", (x,), (y,), name="aten.native_batch_norm")
    (finding,) = run(b.step(), h200, select=["LAY"])
    assert re.match(
        r"convolutions, all passes: .* -> .*; batch normalization and pooling: ", finding.arithmetic[0]
    )


def test_one_convolution_is_one(h200: Gpu) -> None:
    b = StepBuilder(batch=256, training=False)
    b.conv("conv", 64, 64, 56, channels_last=False, x=b.tensor(256, 64, 56, 56))
    (finding,) = run(b.step(), h200, select=["LAY"])
    assert finding.message.startswith("1 convolution runs in NCHW;")


def test_channels_last_is_left_alone(h200: Gpu) -> None:
    assert run(resnet(), h200, select=["LAY"]) == []


def test_fp32_convolutions_without_tensor_cores_stay_in_nchw(h200: Gpu) -> None:
    b = StepBuilder(batch=64, dtype="fp32")
    b.conv("conv", 64, 64, 56, channels_last=False, x=b.tensor(64, 64, 56, 56))
    assert run(b.step(), h200, select=["LAY"]) == []


def test_where_tensor_cores_do_not_take_the_element_type_nothing_is_turned() -> None:
    for gpu, dtype, count in (("v100", "bf16", 0), ("t4", "bf16", 0), ("v100", "fp16", 1), ("t4", "fp16", 1)):
        b = StepBuilder(batch=256, training=False, dtype=dtype)
        x, y = b.tensor(256, 64, 56, 56), b.tensor(256, 64, 56, 56)
        b.conv("conv", 64, 64, 56, channels_last=False, x=x)
        b.stream("norm", "normalization", (x,), (y,), name="aten.native_batch_norm")
        assert len(run(b.step(), gpus.get(gpu), select=["LAY001"])) == count


def test_misaligned_channels_are_not_turned(h200: Gpu) -> None:
    """Measured on an H200: 60 -> 60 channels take 425 us in NHWC, 372 us in NCHW."""
    b = StepBuilder(batch=256, training=False)
    b.conv("conv", 60, 60, 56, channels_last=False, x=b.tensor(256, 60, 56, 56))
    assert run(b.step(), h200, select=["LAY"]) == []


def copies(strided: bool) -> StepBuilder:
    b = StepBuilder()
    for i in range(4):
        module = f"blocks.{i}.norm"
        x, y = b.tensor(128, 56, 56, 384), b.tensor(128, 384, 56, 56)
        b.stream(module, "copy", (x,), (y,), name="aten.clone", strided=strided)
        b.linear(f"blocks.{i}.fc", 128 * 56 * 56, 384, 384)
    return b


def test_layout_copies_of_all_blocks_are_one_finding(h200: Gpu) -> None:
    (finding,) = run(copies(strided=True).step(), h200, select=["LAY002"])
    assert (finding.module, finding.sites) == ("blocks.*.norm", 4)
    assert "4 copies" in finding.message
    assert run(copies(strided=False).step(), h200, select=["LAY002"]) == []


def test_joining_tensors_is_no_matter_of_layout(h200: Gpu) -> None:
    b = StepBuilder(training=False)
    cache, token, both = (b.tensor(64, 32, tokens, 128) for tokens in (2047, 1, 2048))
    b.stream("attn", "copy", (cache, token), (both,), name="aten.cat", strided=True)
    assert run(b.step(), h200, select=["LAY002"]) == []


def test_large_aligned_products_do_not_care(h200: Gpu, a100: Gpu) -> None:
    for gpu in (h200, a100):
        assert run(gpt2(), gpu, select=["LAY003"]) == []


@pytest.mark.parametrize(
    ("copied", "found"),
    [(lambda x: x.transpose(1, 2).contiguous(), True), (lambda x: torch.cat([x.mT, x.mT + 1], 1), False)],
    ids=["contiguous", "joined"],
)
def test_what_joins_tensors_is_no_copy_of_one(
    copied: Callable[[torch.Tensor], torch.Tensor], found: bool
) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return copied(self.layer(x))

    step = capture(Turned(), torch.empty(64, 1024, 1024, device="meta"), amp="bf16", train=False)
    assert bool(findings(step, "LAY002")) is found


def test_group_normalization_copies_its_images_back() -> None:
    """Where that takes what convolutions in NHWC save, nothing is advised."""

    def captured(norm: nn.Module, **how: bool) -> Step:
        layers = [nn.Conv2d(48, 48, 3, padding=1), norm, nn.SiLU()]
        model = nn.Sequential(*(layer for _ in range(4) for layer in layers))
        return capture(model, torch.empty(16, 48, 256, 256, device="meta"), amp="bf16", **how)

    norm = nn.GroupNorm(8, 48)
    assert saved_s(captured(norm), captured(norm, channels_last=True)) < 0
    assert not findings(captured(norm), "LAY001")
    assert findings(captured(nn.BatchNorm2d(48)), "LAY001")
