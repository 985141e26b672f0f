from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from physics import least_s
from tilefit.capture import capture
from tilefit.cost import MEMORY, estimate
from tilefit.cost.estimate import LATENCY
from tilefit.cost.model import analytic
from tilefit.cost.priced import left_out
from tilefit.gpus import get
from tilefit.ops import Streaming
from tilefit.ops.streaming import ROLES


def pointwise(megabytes: float, **changes: object) -> Streaming:
    size = int(megabytes * 1e6)
    arguments = {"role": "pointwise", "elements": size // 2, "read_bytes": size, "write_bytes": size}
    return Streaming(**(arguments | {"dtype": "bf16"} | changes))  # type: ignore[arg-type]


@given(
    st.sampled_from(ROLES),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
    st.booleans(),
    st.sampled_from(["t4", "a100", "l40s", "h200"]),
)
@settings(deadline=None)  # the first example reads a calibration
def test_nothing_beats_the_published_peak_and_bandwidth(
    role: str, read: int, written: int, strided: bool, gpu: str
) -> None:
    op = Streaming(role, max(read, written) // 4, read, written, strided=strided)
    predicted = estimate(op, gpu)
    assert least_s(op, gpu) <= predicted.low_s <= predicted.time_s <= predicted.high_s


def test_large_tensors_move_at_most_of_the_bandwidth() -> None:
    op = pointwise(2000)
    rate = op.moved_bytes / analytic(op, get("h200")).time_s
    assert 0.7 * get("h200").memory_bandwidth_bytes_per_s < rate < get("h200").memory_bandwidth_bytes_per_s
    assert analytic(op, get("h200")).bound == MEMORY


def test_a_small_tensor_costs_a_kernel() -> None:
    predicted = analytic(pointwise(0.001), get("h200"))
    assert predicted.bound == LATENCY
    assert 1e-6 < predicted.time_s < 4e-6
    assert analytic(pointwise(0.001, kernels=10), get("h200")).time_s == pytest.approx(
        10 * predicted.time_s, rel=0.02
    )


def test_what_fits_the_l2_is_faster_than_memory() -> None:
    # 4 MB in, 4 MB out, on a card with 96 MB of L2 and 864 GB/s.
    predicted = estimate(pointwise(4), "l40s")
    assert predicted.memory_s < 8e6 / get("l40s").memory_bandwidth_bytes_per_s


def test_strided_accesses_and_sorts_are_slower() -> None:
    for gpu, factor in (("h200", 1.5), ("l40s", 1.05)):  # a slower memory hides more of it
        plain = estimate(pointwise(1000, role="copy", function="clone"), gpu).time_s
        transposed = pointwise(1000, role="copy", function="clone", strided=True, inner=1)
        assert estimate(transposed, gpu).time_s > factor * plain
        assert estimate(pointwise(1000, role="sort"), gpu).time_s > 5 * plain


def test_time_grows_with_bytes() -> None:
    times = [estimate(pointwise(size), "h200").time_s for size in (0.1, 1, 5, 10, 20, 40, 80, 160, 1000)]
    assert times == sorted(times)


@pytest.mark.parametrize("strided", [False, True])
def test_given_statistics_are_applied_faster_than_they_are_made(strided: bool) -> None:
    training = pointwise(
        200, role="normalization", inner=1605632, strided=strided, function="native_batch_norm"
    )
    inference = replace(training, inner=0, kernels=2, function="batch_norm_elemt")
    made_s, applied_s = (estimate(op, "h200").time_s for op in (training, inference))
    # ResNet-50's first norm, 103 million elements: the kernel that applies is slower than a plain one.
    assert 1.3 * estimate(pointwise(200), "h200").time_s < applied_s < 0.6 * made_s
    assert estimate(replace(inference, strided=True), "h200").time_s <= applied_s


@pytest.mark.parametrize(
    ("function", "role", "h100_us"),
    [("logsumexp", "reduction", 13.6), ("binary_cross_entropy_with_logits", "loss", 8.3)],
)
def test_small_operations_of_many_kernels_take_their_time(function: str, role: str, h100_us: float) -> None:
    """Nine and six kernels, in two small programs on an H100."""
    op = Streaming(role, 4096, 16384, 128, function=function)
    assert estimate(op, "h100-sxm").time_s == pytest.approx(h100_us * 1e-6, rel=0.5)


@pytest.mark.parametrize(
    ("backward", "rows", "width", "dtype", "h100_us"),
    [
        (False, 2048, 50257, "fp32", 527.8),
        (False, 8192, 32000, "fp32", 1297.8),
        (False, 2048, 128256, "bf16", 703.7),
        (False, 8192, 16384, "fp32", 395.6),
        (True, 2048, 50257, "fp32", 586.5),
    ],
)
def test_long_rows_of_a_softmax_are_read_again(
    backward: bool, rows: int, width: int, dtype: str, h100_us: float
) -> None:
    """On an H100 of which nothing is fitted (``benchmarks/function_times.py``): but for the last but one they
    outgrow its L2 cache.
    """
    size = rows * width * (4 if dtype == "fp32" else 2)
    function = "_log_softmax" + "_backward_data" * backward
    op = Streaming(
        "softmax", rows * width, size * (1 + backward), size, dtype, inner=width, function=function
    )
    assert estimate(op, left_out(get("h100-sxm"))).time_s == pytest.approx(h100_us * 1e-6, rel=0.15)


@pytest.mark.parametrize(
    ("function", "elements", "moved", "us"),
    [
        ("_foreach_sqrt", 653_844, 5_222_592, 12.9),
        ("_foreach_addcmul", 1_068_940, 12_827_136, 9.9),
        ("_foreach_div", 1_188_355, 9_506_840, 13.0),
        # Beyond the L2 cache everything comes from memory.
        ("_foreach_addcdiv", 166_899_522, 2_670_392_336, 1007.3),
    ],
)
def test_tensors_that_an_optimizer_has_just_written_are_in_the_cache(
    function: str, elements: int, moved: int, us: float
) -> None:
    """Adam of programs that set nothing, on an H100."""
    op = Streaming("optimizer", elements, moved * 2 // 3, moved // 3, function=function)
    op = replace(op, kernels=9 if moved > 1e9 else 1)
    assert estimate(op, "h100-sxm").time_s == pytest.approx(us * 1e-6, rel=0.35)


@pytest.mark.parametrize(
    ("rows", "width", "sliced", "h100_us"),
    [(65_536, 768, False, 141), (65_536, 768, True, 232), (8_192, 768, True, 33)],
)
def test_slices_are_joined_element_by_element(rows: int, width: int, sliced: bool, h100_us: float) -> None:
    """Two tensors of bf16, along their rows."""

    class Join(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, y], -1)

    with torch.device("meta"):
        whole = torch.empty(rows, width * (1 + sliced), dtype=torch.bfloat16)
    (entry,) = capture(Join(), (whole[:, :width], whole[:, :width]), train=False).ops
    assert estimate(entry.op, "h100-sxm").time_s == pytest.approx(h100_us * 1e-6, rel=0.35)


@pytest.mark.parametrize(
    ("shape", "h100_us"),
    [((16, 1024, 12, 64), 78.2), ((8, 1024, 12, 64), 40.4), ((8, 512, 16, 64), 27.7)],
)
def test_keys_that_an_empty_cache_takes_are_joined_by_few_threads(
    shape: tuple[int, ...], h100_us: float
) -> None:
    """Of GPT-2, OPT and BART."""

    class Fill(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.new_empty(0), x.transpose(1, 2)], -2)

    with torch.device("meta"):
        keys = torch.empty(shape, dtype=torch.bfloat16)
    (entry,) = capture(Fill(), (keys,), train=False).ops
    assert estimate(entry.op, "h100-sxm").time_s == pytest.approx(h100_us * 1e-6, rel=0.05)


@pytest.mark.parametrize(
    ("function", "elements", "moved_bytes", "h100_ms"),
    [
        ("upsample_bilinear2d", 415_236_096, (122_683_392, 1_660_944_384), 3.71),
        ("upsample_bilinear2d_backward", 314_572_800, (1_258_291_200, 78_643_200), 4.95),
    ],
)
def test_an_interpolation_takes_its_corners(
    function: str, elements: int, moved_bytes: tuple[int, int], h100_ms: float
) -> None:
    op = Streaming("indexing", elements, *moved_bytes, dtype="fp32", function=function)
    assert estimate(op, get("h100-sxm")).time_s == pytest.approx(1e-3 * h100_ms, rel=0.03)
    same = 4 * elements
    copy = replace(op, read_bytes=same, write_bytes=same)
    nearest = replace(copy, function=function.replace("bilinear", "nearest"))
    assert estimate(copy, get("h100-sxm")) == estimate(nearest, get("h100-sxm"))


def test_ctc_takes_its_steps_one_after_another() -> None:
    loss = Streaming("loss", 92_800, 371_520, 268_816, function="_ctc_loss", inner=800)
    shorter = replace(loss, inner=200)
    times = [estimate(op, "h100-sxm").time_s for op in (loss, shorter)]
    assert times == pytest.approx([421e-6, 106e-6], rel=0.35)


def test_cudnn_applies_given_statistics_in_16_bits_as_fast_as_multiprocessors_move_elements() -> None:
    elements = 16 * 1024 * 56 * 56
    op = Streaming(
        "normalization", elements, 2 * elements, 2 * elements, "fp16", kernels=2, function="batch_norm_elemt"
    )
    assert estimate(op, "h100-sxm").time_s == pytest.approx(134e-6, rel=0.25)
