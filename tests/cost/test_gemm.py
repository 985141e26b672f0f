"""Products: physical floor, monotony, alignment against what was measured on an H200."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from physics import least_s
from tilefit import gpus
from tilefit.capture import capture
from tilefit.cost import MATH, MEMORY, estimate
from tilefit.cost.constants import clock_headroom
from tilefit.cost.estimate import DATASHEET, ESTIMATED, LATENCY
from tilefit.cost.kernels import select
from tilefit.cost.model import analytic
from tilefit.cost.priced import left_out
from tilefit.errors import UsageError
from tilefit.ops import Gemm
from tilefit.ops.dtypes import alignment_bytes

GPUS = tuple(gpus.get(name) for name in ("v100", "t4", "a100", "l40s", "rtx-4090", "h100", "h200", "b200"))
H200 = gpus.get("h200")

SIZES = st.integers(1, 20_000)
PRODUCTS = st.builds(
    Gemm,
    m=SIZES,
    n=SIZES,
    k=SIZES,
    dtype=st.sampled_from(["bf16", "fp16", "tf32", "fp32", "fp8", "int8", "fp64"]),
    layout=st.sampled_from(["NN", "TN", "NT", "TT"]),
    batch=st.integers(1, 64),
    out_dtype=st.sampled_from(["", "fp32", "bf16", "int8"]),
)
ALIGNED = st.builds(
    Gemm,
    m=st.integers(1, 300).map(lambda i: 64 * i),
    n=st.integers(1, 300).map(lambda i: 64 * i),
    k=st.integers(1, 300).map(lambda i: 64 * i),
    dtype=st.sampled_from(["bf16", "fp32"]),
    batch=st.integers(1, 16),
)


@given(PRODUCTS, st.sampled_from(GPUS))
@settings(deadline=None)  # the first reads the calibrations
def test_never_below_the_physical_floor_and_inside_its_interval(gemm: Gemm, gpu: gpus.Gpu) -> None:
    if gemm.dtype in ("fp8", "int8") and not gpu.supports(gemm.dtype):
        with pytest.raises(UsageError, match=f"no units for {gemm.dtype} products"):
            estimate(gemm, gpu)
        return
    predicted = estimate(gemm, gpu)
    fastest = clock_headroom(gpu)
    assert least_s(gemm, gpu) / fastest <= predicted.low_s <= predicted.time_s <= predicted.high_s
    assert predicted.bound in (MATH, MEMORY, LATENCY)
    assert predicted.time_s >= gemm.flop / (gpu.peak_flop_per_s(gemm.dtype) * fastest)


@given(ALIGNED, st.sampled_from(GPUS))
@settings(max_examples=60)
def test_more_products_and_a_longer_contraction_never_take_less(gemm: Gemm, gpu: gpus.Gpu) -> None:
    now = analytic(gemm, gpu).time_s * (1 - 1e-9)
    assert analytic(replace(gemm, batch=gemm.batch + 1), gpu).time_s >= now
    assert analytic(replace(gemm, k=gemm.k + 64), gpu).time_s >= now
    assert analytic(replace(gemm, k=2 * gemm.k), gpu).time_s >= now


# Microseconds on an H200 (PyTorch 2.11, CUDA 13.0), bf16, 4096^3 with one dimension changed. The letters are
# cuBLAS's.
@pytest.mark.parametrize(
    ("layout", "dimension", "size", "measured"),
    [
        ("NN", "m", 4089, 202),
        ("NN", "m", 4090, 200),
        ("NN", "n", 4088, 230),
        ("NN", "n", 4089, 1049),
        ("NN", "n", 4090, 495),
        ("NN", "n", 4092, 493),
        ("NN", "k", 4089, 1052),
        ("NN", "k", 4090, 524),
        ("NN", "k", 4104, 209),
        ("TN", "m", 4089, 200),
        ("TN", "n", 4089, 1472),
        ("TN", "n", 4092, 495),
        ("TN", "k", 4089, 1180),
        ("TN", "k", 4092, 530),
        ("NT", "m", 4089, 997),
        ("NT", "m", 4092, 493),
        ("NT", "n", 4089, 1031),
        ("NT", "n", 4090, 511),
        ("NT", "k", 4089, 201),
        ("NT", "k", 4092, 215),
    ],
)
def test_what_a_misaligned_dimension_costs_on_an_h200(
    layout: str, dimension: str, size: int, measured: float
) -> None:
    aligned = Gemm(4096, 4096, 4096, "bf16", layout)
    sizes = {"m": 4096, "n": 4096, "k": 4096} | {dimension: size}
    slowdown = analytic(Gemm(**sizes, layout=layout), H200).time_s / analytic(aligned, H200).time_s  # type: ignore[arg-type]
    # The aligned products took 194 to 214 us, about the noise.
    assert slowdown == pytest.approx(measured / 204, rel=0.3)


@pytest.mark.parametrize(
    ("dimension", "size", "measured"),
    [("m", 4093, 381), ("n", 4093, 1148), ("n", 4094, 1069), ("k", 4093, 1170), ("k", 4094, 1049)],
)
def test_what_a_misaligned_dimension_costs_in_tf32(dimension: str, size: int, measured: float) -> None:
    sizes = {"m": 4096, "n": 4096, "k": 4096} | {dimension: size}
    slowdown = (
        analytic(Gemm(**sizes, dtype="tf32"), H200).time_s  # type: ignore[arg-type]
        / analytic(Gemm(4096, 4096, 4096, "tf32"), H200).time_s
    )
    assert slowdown == pytest.approx(measured / 385, rel=0.15)


@pytest.mark.parametrize(("vocabulary", "padded"), [(50257, 50304), (32001, 32064), (32003, 32064)])
def test_an_odd_vocabulary_costs_about_5_5_times_the_padded_one(vocabulary: int, padded: int) -> None:
    # H200, 16384 tokens x 768: forward, data gradient and weight gradient together.
    def three(size: int) -> float:
        return sum(
            estimate(gemm, H200).time_s
            for gemm in (
                Gemm(16384, size, 768, layout="TN"),
                Gemm(16384, 768, size, layout="NN"),
                Gemm(size, 768, 16384, layout="NT"),
            )
        )

    assert three(vocabulary) / three(padded) == pytest.approx(5.5, rel=0.2)


def test_a_multiple_of_8_is_nearly_as_good_as_one_of_64() -> None:
    partial = estimate(Gemm(16384, 50264, 768), H200).time_s
    assert 1.0 < partial / estimate(Gemm(16384, 50304, 768), H200).time_s < 1.08


def test_misalignment_falls_off_the_hopper_path_and_says_which_operand() -> None:
    kernel = select(Gemm(4096, 4096, 4089), H200)
    assert (kernel.family, kernel.misaligned, kernel.alignment_bytes) == ("sm80", "A", 2)
    assert "4089" in kernel.reason
    assert select(Gemm(4096, 50257, 4096), H200).misaligned == "C"
    assert select(Gemm(4095, 4096, 4096), H200).family == "sm90"
    assert analytic(Gemm(4096, 4096, 4089), H200).kernel_family == "sm80"


def test_a_slice_counts_by_the_matrix_it_was_cut_from() -> None:
    assert select(Gemm(4096, 4096, 4089, ld_a=4096, ld_b=4096), H200).family == "sm90"
    assert select(Gemm(4096, 4096, 4096, ld_a=4097), H200).misaligned == "A"


def test_an_operand_of_one_row_has_no_rows_to_align() -> None:
    assert select(Gemm(1, 4096, 4096, ld_a=4097), H200).family == "sm90"


def test_misalignment_is_milder_where_the_tensor_cores_are_slower() -> None:
    def penalty(name: str) -> float:
        odd, even = Gemm(4096, 4096, 4095), Gemm(4096, 4096, 4096)
        return estimate(odd, name).time_s / estimate(even, name).time_s

    assert penalty("h200") > penalty("a100") > 1.5
    # pytorch#181718: on an RTX 4090 an odd size is no slower.
    assert penalty("rtx-4090") < 1.15


@pytest.mark.parametrize(("kind", "parts"), [("complex64", "fp32"), ("complex128", "fp64")])
def test_complex_products_do_four_times_the_work_of_real_ones(kind: str, parts: str) -> None:
    whole, part = Gemm(2048, 2048, 2048, kind), Gemm(2048, 2048, 2048, parts)
    assert whole.flop == 4 * part.flop
    assert estimate(whole, H200).time_s > 2 * estimate(part, H200).time_s


def test_fp32_runs_on_cuda_cores_whatever_its_alignment() -> None:
    odd = analytic(Gemm(4096, 4096, 4095, "fp32"), H200)
    assert odd.kernel_family == "simt"
    assert odd.time_s == pytest.approx(analytic(Gemm(4096, 4096, 4096, "fp32"), H200).time_s, rel=0.02)
    # Measured: 51 TFLOP/s at 4096^3.
    assert 2 * 4096**3 / odd.time_s == pytest.approx(51e12, rel=0.1)


@pytest.mark.parametrize(
    ("dtype", "size", "tflops"), [("bf16", 4096, 698), ("bf16", 8192, 687), ("tf32", 4096, 355)]
)
def test_sustained_rates_of_an_h200_lie_in_the_interval(dtype: str, size: int, tflops: float) -> None:
    predicted = analytic(Gemm(size, size, size, dtype), H200)
    # Sustained runs are throttled; bursts of the same product reach 770 to 800.
    assert predicted.low_s <= 2 * size**3 / (tflops * 1e12) <= predicted.high_s * 1.1


def test_bf16_without_hardware_support_falls_to_the_fp32_pipelines() -> None:
    assert estimate(Gemm(1024, 1024, 1024, "bf16"), "v100").kernel_family == "simt"


def test_provenance_says_whether_the_gpu_was_in_a_table() -> None:
    assert estimate(Gemm(512, 512, 512), "h200").provenance == ESTIMATED
    unseen = estimate(Gemm(512, 512, 512), "b200")
    seen = estimate(Gemm(512, 512, 512), "h200")
    assert unseen.provenance == DATASHEET
    assert unseen.high_s / unseen.time_s > seen.high_s / seen.time_s


def test_a_tiny_product_is_bound_by_latency() -> None:
    assert estimate(Gemm(32, 32, 32), H200).bound == LATENCY


@pytest.mark.parametrize(
    ("elements", "dtype", "expected"),
    [(50257, "bf16", 2), (50304, "bf16", 128), (30522, "bf16", 4), (28996, "bf16", 8), (4092, "tf32", 16)],
)
def test_alignment_in_bytes(elements: int, dtype: str, expected: int) -> None:
    assert alignment_bytes(elements, dtype) == expected


def test_a_matrix_that_all_products_share_is_read_once() -> None:
    apart = Gemm(7, 1536, 512, "fp16", batch=4096)
    shared = replace(apart, same_b=True)
    assert apart.read_bytes - shared.read_bytes == 4095 * 1536 * 512 * 2
    assert estimate(shared, "rtx-3090").time_s < 0.5 * estimate(apart, "rtx-3090").time_s


@pytest.mark.parametrize(("train", "same"), [(False, True), (True, False)])
def test_a_linear_layer_multiplies_transposed_inputs_one_by_one_without_gradients(
    train: bool, same: bool
) -> None:
    with torch.device("meta"):
        inputs = torch.empty(64, 32, 49).transpose(1, 2)
        step = capture(torch.nn.Linear(32, 16), inputs, train=train, amp="fp16")
    product = next(entry.op for entry in step.ops if isinstance(entry.op, Gemm))
    assert (product.same_b, product.batch) == ((True, 64) if same else (False, 1))


def test_a_pcie_card_sustains_less_than_a_module() -> None:
    large = Gemm(8192, 8192, 8192, "fp16")
    module_s, card_s = (estimate(large, f"a100-{kind}-40gb").time_s for kind in ("sxm", "pcie"))
    assert card_s == pytest.approx(module_s / 0.9, rel=0.03)


@pytest.mark.parametrize(("name", "rows"), [("h100-sxm", "h100"), ("h200", "h200")])
def test_what_ships_is_nearer_to_another_machine_than_the_donor_is(name: str, rows: str) -> None:
    """Every 17th misaligned product of the families held out: on an H100 that taught nothing, and on the
    second H200, of which other families did."""
    gpu = gpus.get(name)
    off: dict[str, list[float]] = {"ships": [], "donor": []}
    inside = []
    with (Path(__file__).parents[1] / "data" / f"misaligned_{rows}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            sizes = (int(row[name]) for name in "mnk")
            op = Gemm(*sizes, row["dtype"], row["layout"], int(row["batch"]), bias=row["bias"] == "1")
            measured_s = 1e-6 * float(row["us"])
            found = estimate(op, gpu)
            off["ships"].append(abs(found.time_s / measured_s - 1))
            off["donor"].append(abs(estimate(op, left_out(gpu)).time_s / measured_s - 1))
            inside.append(found.low_s <= measured_s <= found.high_s)
    mean = {name: sum(each) / len(each) for name, each in off.items()}
    assert mean["ships"] < 0.095
    assert mean["ships"] < 0.95 * mean["donor"]
    assert 0.65 < sum(inside) / len(inside) < 0.95
