"""INT006 and the prices behind it: filters that cuDNN's Tensor Core kernels do not take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilefit import gpus
from tilefit.capture import capture
from tilefit.cost import estimate
from tilefit.cost.conv import falls
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Conv2d
from whatif import findings

#: Batch, channels, image, filter; forward, data gradient, weight gradient in microseconds on an H100
#: (channels-last, ``benchmarks/results/large_filters_h100.jsonl``).
MEASURED = {
    (8, 48, 512, 112, 7): (6889, 879, 9109),
    (32, 256, 256, 14, 7): (1921, 71, 1491),
    (32, 128, 128, 28, 7): (109, 72, 300),
    (64, 64, 64, 56, 7): (202, 230, 965),
    (16, 64, 128, 64, 11): (266, 409, 865),
    (64, 64, 64, 56, 5): (110, 111, 105),
}


def conv(shape: tuple[int, ...], direction: str = FORWARD, dtype: str = "bf16") -> Conv2d:
    n, channels, filters, image, size = shape
    return Conv2d(
        n, channels, filters, image, size, 1, size // 2, dtype=dtype, channels_last=True, direction=direction
    )


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_prices(shape: tuple[int, ...]) -> None:
    for direction, us in zip((FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT), MEASURED[shape], strict=True):
        op = conv(shape, direction)
        assert us / 1.5 < estimate(op, "h100-sxm").time_s * 1e6 < us * 1.5
        assert falls(op, gpus.get("h100-sxm")) == (us > 1400)


def test_is_known_where_it_was_measured() -> None:
    large = (32, 256, 256, 14, 7)
    assert falls(conv(large), gpus.get("h200"))
    assert not falls(conv(large), gpus.get("a100-sxm-80gb"))
    assert not falls(conv(large, dtype="fp32"), gpus.get("h200"))


def test_the_sum_over_rows_is_priced_as_it_was_measured() -> None:
    net = nn.Sequential(*(nn.Conv2d(256, 256, 7, padding=3) for _ in range(2))).bfloat16()
    step = capture(net, torch.empty(128, 256, 14, 14, device="meta", dtype=torch.bfloat16), train=True)
    (found,) = findings(step, "INT006")
    # Each, of 32 images: 3.5 to 0.9 ms.
    assert 17e-3 < found.gain_s < 23e-3
    assert not findings(step, "INT006", gpu="a100-sxm-80gb", min_gain=0)
