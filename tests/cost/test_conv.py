"""Convolutions, against what was measured on an H200 (PyTorch 2.11, cuDNN 9.19, bf16, autotuned)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from physics import least_s
from tilefit.capture import capture
from tilefit.cost import MEMORY, estimate
from tilefit.cost.footprint import converted_bytes
from tilefit.cost.fusion import fuse
from tilefit.cost.model import analytic
from tilefit.cost.sums import SUMMED
from tilefit.gpus import get
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Conv, Conv2d, Streaming

H200 = get("h200")


@pytest.mark.parametrize(
    ("channels", "size", "channels_last", "measured_us"),
    [
        ((64, 64), 56, True, 146),
        ((64, 64), 56, False, 308),
        ((60, 60), 56, True, 425),
        ((60, 60), 56, False, 372),
        ((63, 63), 56, True, 455),
        ((256, 256), 14, True, 81),
        ((256, 256), 14, False, 137),
        ((250, 250), 14, True, 166),
        ((250, 250), 14, False, 156),
    ],
)
def test_3x3_layers_by_layout_and_channels(
    channels: tuple[int, int], size: int, channels_last: bool, measured_us: float
) -> None:
    conv = Conv2d(256, *channels, size, 3, 1, 1, channels_last=channels_last)
    assert analytic(conv, H200).time_s == pytest.approx(measured_us * 1e-6, rel=0.2)


@pytest.mark.parametrize(
    ("channels_last", "channels", "measured_us"),
    [(True, 3, 1757), (True, 4, 1747), (False, 3, 2466), (False, 4, 2433)],
)
def test_a_first_layer_gains_nothing_forward_from_a_fourth_channel(
    channels_last: bool, channels: int, measured_us: float
) -> None:
    conv = Conv2d(256, channels, 64, 224, 7, 2, 3, channels_last=channels_last)
    assert analytic(conv, H200).time_s == pytest.approx(measured_us * 1e-6, rel=0.1)


@pytest.mark.parametrize(("direction", "measured_us"), [(FORWARD, 1773), (BACKWARD_WEIGHT, 1121)])
def test_the_first_layer_of_resnet(direction: str, measured_us: float) -> None:
    # benchmarks/results/first_convolution.h200.json
    conv = Conv2d(256, 3, 64, 224, 7, 2, 3, channels_last=True, direction=direction)
    assert estimate(conv, H200).time_s == pytest.approx(measured_us * 1e-6, rel=0.15)


def test_padding_channels_and_channels_last_pay() -> None:
    def time_s(channels: int, channels_last: bool) -> float:
        return analytic(
            Conv2d(256, channels, channels, 56, 3, 1, 1, channels_last=channels_last), H200
        ).time_s

    assert time_s(60, True) / time_s(64, True) == pytest.approx(2.9, rel=0.15)
    assert time_s(64, False) / time_s(64, True) == pytest.approx(2.1, rel=0.15)
    # Channels-last loses where the channels are misaligned.
    assert time_s(60, False) < time_s(60, True)


def test_groups_of_a_power_of_two_of_channels_have_kernels_for_all_of_them() -> None:
    def rate(channels: int, gpu: str) -> float:
        conv = Conv2d(256, 8 * channels, 8 * channels, 28, 3, 1, 1, groups=8, channels_last=True)
        return conv.flop / estimate(conv, gpu).time_s

    # As the H200 was measured to do; the RTX 4090 was not.
    for gpu in ("h200", "rtx-4090"):
        assert rate(64, gpu) > 1.5 * rate(72, gpu)
        assert rate(128, gpu) > 1.5 * rate(112, gpu)


def test_a_depthwise_layer_moves_bytes_on_cuda_cores() -> None:
    depthwise = Conv2d(64, 256, 256, 56, 3, 1, 1, groups=256, channels_last=True)
    predicted = estimate(depthwise, H200)
    assert (predicted.bound, predicted.kernel_family) == (MEMORY, "simt")
    dense = estimate(Conv2d(64, 256, 256, 56, 3, 1, 1, channels_last=True), H200)
    assert depthwise.flop / predicted.time_s < 0.05 * 256 * depthwise.flop / dense.time_s


CONVS = st.builds(
    Conv2d,
    batch=st.integers(1, 64),
    in_channels=st.integers(1, 64).map(lambda i: 8 * i),
    out_channels=st.integers(1, 300),
    input_size=st.integers(7, 64),
    kernel_size=st.sampled_from([1, 3, 5, 7]),
    stride=st.sampled_from([1, 2]),
    padding=st.just(3),
    dtype=st.sampled_from(["bf16", "fp32", "tf32"]),
    channels_last=st.booleans(),
    direction=st.sampled_from([FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT]),
)


@given(CONVS)
def test_nothing_beats_the_published_peak_but_winograd(conv: Conv) -> None:
    predicted = estimate(conv, H200)
    # Winograd's F(2x2, 3x3) saves at most 2.25 of the multiplications.
    saved = 2.25 if conv.dtype == "fp32" else 1.0
    assert least_s(conv, H200, saved) <= predicted.low_s <= predicted.time_s <= predicted.high_s


def test_gradients_take_about_as_long_as_the_forward_pass() -> None:
    times = [
        estimate(Conv2d(128, 256, 256, 28, 3, 1, 1, channels_last=True, direction=d), H200).time_s
        for d in (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT)
    ]
    assert max(times) < 1.5 * min(times)


@pytest.mark.parametrize(
    ("channels", "last", "copies"), [(37, False, True), (64, False, True), (64, True, False)]
)
def test_converted_images_take_memory_beside_the_step(channels: int, last: bool, copies: bool) -> None:
    """Of input and output, with whole accesses of channels, while nothing but these is alive."""
    with torch.device("meta"):
        model = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        images = torch.empty(32, channels, 64, 64)
    step = capture(model, images, train=False, amp="bf16", channels_last=last)
    whole = -(-channels // 8) * 8
    expected = 2 * 32 * whole * 64 * 64 * 2
    assert converted_bytes(step, get("h100-sxm")) == pytest.approx(expected if copies else 0, rel=0.1)


@pytest.mark.parametrize(
    ("conv", "measured_us"),
    [
        (Conv2d(8, 512, 512, 7, 1, direction=BACKWARD_WEIGHT), 36),
        (Conv2d(16, 512, 2048, 7, 1, direction=BACKWARD_WEIGHT), 96),
        (Conv2d(16, 64, 64, 56, 3, 1, 1, direction=BACKWARD_WEIGHT), 378),
        (Conv2d(16, 3, 64, 224, 7, 2, 3), 1177),
    ],
)
def test_sums_in_memory_and_wide_tiles_before_ampere(conv: Conv, measured_us: float) -> None:
    """DeepBench's T4 (cuDNN 7.6)."""
    op = replace(conv, dtype="fp16", channels_last=True)
    assert estimate(op, "t4").time_s == pytest.approx(measured_us * 1e-6, rel=0.3)


def test_a_bias_is_added_by_a_kernel_of_its_own_unless_the_step_is_compiled() -> None:
    """157 million elements of six layers took 485 us on an H200."""
    layer = torch.nn.Conv2d(150, 150, 3, padding=1)
    step = capture(layer, (torch.zeros(64, 150, 64, 64),), train=False, amp="bf16")
    (eager,) = (entry.op for entry in step.ops if isinstance(entry.op, Conv))
    bare = replace(eager, bias=False)
    added_s = estimate(eager, H200).time_s - estimate(bare, H200).time_s
    assert added_s == pytest.approx(eager.output_elements / 157.3e6 * 485e-6, rel=0.1)
    compiled = capture(layer, (torch.zeros(64, 150, 64, 64),), train=False, amp="bf16", compile=True)
    assert not any(entry.op.bias for entry in fuse(compiled).ops if isinstance(entry.op, Conv))


@pytest.mark.parametrize(
    ("batch", "size", "channels", "last", "measured_us"),
    [
        (128, 7, 96, False, 27.5),  # a warp for each channel
        (128, 14, 96, False, 9.5),  # a block
        (32, 56, 160, False, 48.4),  # two on some multiprocessors
        (2, 56, 72, True, 8.0),
        (128, 28, 288, True, 101.7),  # the last block adds up what hundreds left
        (8, 28, 233, True, 6.3),  # an odd number of channels: one at a time, by more threads
    ],
)
def test_a_bias_gradient_takes_what_its_channels_and_blocks_leave(
    batch: int, size: int, channels: int, last: bool, measured_us: float
) -> None:
    """Sizes drawn anew, bf16 and fp16, on an H100 (``benchmarks/conv_bias.py --seed 4``)."""
    elements = batch * size**2 * channels
    op = Streaming("reduction", elements, 2 * elements, 2 * channels, "bf16", function=SUMMED, strided=last)
    assert estimate(op, "h100-sxm").time_s == pytest.approx(measured_us * 1e-6, rel=0.25)


@pytest.mark.parametrize(("size", "last"), [(8, False), (8, True), (1, False)])
def test_the_layout_of_a_bias_gradient_is_captured(size: int, last: bool) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Conv2d(16, 24, 1), torch.nn.Conv2d(24, 32, 1))
        images = torch.empty(4, 16, size, size)
    step = capture(model, images, train=True, channels_last=last)
    sums = [entry.op for entry in step.ops if isinstance(entry.op, Streaming) and entry.op.function == SUMMED]
    assert sums[-1].strided == (last or size == 1)  # of the first layer, whose gradient lies as its output
