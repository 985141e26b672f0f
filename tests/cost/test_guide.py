"""The numbers NVIDIA's deep learning performance guide publishes come out of the model.

Sources: NVIDIA, "GPU Performance Background", "Matrix Multiplication Background" and "Convolutional Layers"
user's guides (docs.nvidia.com/deeplearning/performance).
"""

from __future__ import annotations

import pytest

from tilefit import gpus
from tilefit.cost import MATH, MEMORY, estimate, tiles
from tilefit.ops import Conv2d, Gemm, Streaming


def test_ops_per_byte_of_a_v100_and_an_a100() -> None:
    # Background: V100, 125 FP16 TFLOP/s over 900 GB/s; A100 80 GB, 312 over 2039 GB/s.
    assert gpus.get("v100").ops_per_byte("fp16") == pytest.approx(138.9, rel=0.01)
    assert gpus.get("a100").ops_per_byte("fp16") == pytest.approx(153.0, rel=0.01)


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (8192, 128, 8192, 124.1),  # Matrix Multiplication Background: memory-limited on a V100
        (8192, 8192, 8192, 2730.7),  # the same: math-limited
        (8192, 1, 8192, 1.0),  # matrix-vector: always memory-limited
        (512, 4096, 1024, 315.1),  # Background: linear layer 1024 -> 4096, batch 512
        (1, 4096, 1024, 1.0),  # the same at batch 1
    ],
)
def test_arithmetic_intensity_examples(m: int, n: int, k: int, expected: float) -> None:
    assert Gemm(m, n, k, "fp16").intensity == pytest.approx(expected, rel=0.002)


def test_pooling_and_relu_are_memory_limited() -> None:
    # Background: 3x3 max pooling 2.25 FLOP/B, ReLU 0.25 FLOP/B, on 2-byte elements.
    n = 1 << 24
    pooling = Streaming("pooling", n, 2 * n, 2 * n, "fp16", flop_per_element=9)
    relu = Streaming("pointwise", n, 2 * n, 2 * n, "fp16", flop_per_element=1)
    assert pooling.intensity == 2.25
    assert relu.intensity == 0.25
    assert estimate(pooling, "v100").bound == MEMORY
    assert estimate(relu, "v100").bound == MEMORY


def test_a_linear_layer_is_math_limited_at_batch_512_and_memory_limited_at_1() -> None:
    # Background, table of layers: 315 and 1 FLOP/B against the V100's 139. The layer is repeated so that the
    # fixed time of a kernel does not decide.
    assert estimate(Gemm(512, 4096, 1024, "fp16", batch=64), "v100").bound == MATH
    assert estimate(Gemm(1, 4096, 1024, "fp16", batch=64), "v100").bound == MEMORY


def test_tiles_and_waves_of_the_test_product_on_an_a100() -> None:
    # Matrix Multiplication Background: 6912 x 2048 in 256x128 tiles is exactly four waves of 108.
    count = tiles.count(6912, 2048, (256, 128))
    assert count == 27 * 16
    assert tiles.waves(count, gpus.get("a100").sms) == 4.0
    assert tiles.last_wave_fill(count, 108) == 1.0


def test_tile_quantization_adds_half_the_work_for_one_row() -> None:
    # Matrix Multiplication Background, tile quantization: 256 -> 257 rows, 128x128 tiles.
    assert tiles.count(256, 256, (128, 128)) == 4
    assert tiles.count(257, 256, (128, 128)) == 6
    assert tiles.tile_efficiency(256, 256, (128, 128)) == 1.0
    assert tiles.tile_efficiency(257, 256, (128, 128)) == pytest.approx(257 / 384)


def test_wave_quantization_is_a_property_of_the_sm_count() -> None:
    # Matrix Multiplication Background, wave quantization: M 2304, 256x128 tiles; one column more than 1536
    # opens a second wave on 108 SMs, and none on the H200's 132.
    full, more = tiles.count(2304, 1536, (256, 128)), tiles.count(2304, 1537, (256, 128))
    assert (full, more) == (108, 117)
    assert tiles.waves(full, 108) == tiles.last_wave_fill(full, 108) == 1.0
    assert tiles.waves(more, 108) / 2 == pytest.approx(0.542, abs=0.001)  # two waves' time
    assert tiles.waves(more, gpus.get("h200").sms) < 1
    assert tiles.waves(full, gpus.get("h200").sms) == pytest.approx(0.818, abs=0.001)


def test_third_party_twin_of_the_wave_example() -> None:
    # H. He, "What Shapes Do Matrix Multiplications Like?": 1792 against 1793 on an A100.
    assert tiles.count(1792, 1792, (256, 128)) == 98
    assert tiles.count(1793, 1793, (256, 128)) == 120


def test_convolution_as_an_implicit_product() -> None:
    # Convolutional Layers, implicit GEMM: N P Q x K x C R S.
    product = Conv2d(32, 64, 128, 56, 3, 1, 1).implicit_gemm
    assert (product.m, product.n, product.k) == (32 * 56 * 56, 128, 64 * 9)


def test_last_wave_fill_counts_the_tiles_left_over() -> None:
    assert tiles.last_wave_fill(109, 108) == pytest.approx(1 / 108)
    assert tiles.last_wave_fill(54, 108) == 0.5
