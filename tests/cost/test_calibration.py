"""The stage fitted to an H200: its file, its accuracy on shapes it never saw, physics, and speed."""

from __future__ import annotations

import json
import sys
import time
from math import inf
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from physics import least_s
from tilefit import gpus
from tilefit.cost import estimate
from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import SOFTENED, least_error, network, read
from tilefit.cost.estimate import ESTIMATED
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import priced
from tilefit.errors import TilefitError
from tilefit.ops import Attention, Conv2d, Gemm, Op, Streaming

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from compress_calibration import number_bytes

H200 = gpus.get("h200")
TABLE = Path(__file__).resolve().parents[2] / "src" / "tilefit" / "cost" / "data" / "h200-donor.npz"

# Drawn at random from the held-out rows, never trained on: an H200, PyTorch 2.11, CUDA 13.0, 2026-11-21,
# operands cold in L2, benchmarks/collect_h200.py. m, n, k, type, layout, batch, leading dimension of A, bias,
# microseconds. The first twelve are aligned, the others not.
PRODUCTS = (
    (36000, 384, 384, "fp32", "NN", 1, 0, False, 259.04),
    (5120, 1280, 5120, "bf16", "TN", 1, 0, True, 93.44),
    (43008, 2216, 8, "fp16", "NT", 1, 0, False, 90.561),
    (32, 272, 512, "fp8", "TN", 1, 0, False, 2.88),
    (128, 1280, 5224, "bf16", "NT", 1, 0, False, 8.735),
    (1280, 5120, 4112, "fp32", "NT", 1, 0, False, 1126.5),
    (336, 512, 8128, "int8", "TN", 1, 0, False, 19.04),
    (128, 3968, 14592, "int8", "TN", 1, 0, False, 33.472),
    (1536, 6144, 1024, "fp8", "TN", 1, 0, False, 20.414),
    (162, 32, 1936, "bf16", "NN", 1, 0, False, 5.408),
    (10240, 10240, 2560, "fp8", "TN", 1, 0, False, 385.02),
    (264, 64, 352, "bf16", "NN", 1, 0, False, 2.752),
    (4111, 259, 176, "bf16", "NT", 1, 0, False, 11.776),
    (129, 274, 1624, "bf16", "NN", 1, 0, False, 9.825),
    (86, 8904, 64, "bf16", "NT", 1, 0, False, 5.856),
    (532, 10, 64, "bf16", "TN", 1, 0, False, 2.592),
    (976, 12, 14848, "bf16", "NN", 1, 0, False, 17.504),
    (8, 1225, 340, "bf16", "TN", 1, 0, False, 6.176),
    (64, 1176, 128, "int8", "TN", 1, 0, False, 6.272),
    (256, 144, 257, "bf16", "TN", 1, 0, False, 6.4),
    (8, 269, 4352, "bf16", "TN", 1, 0, False, 11.424),
    (782, 125, 384, "bf16", "NN", 1, 0, False, 8.799),
    (225, 490, 45, "bf16", "NN", 1, 0, False, 4.192),
    (128, 2518, 10544, "bf16", "TN", 1, 0, False, 40.896),
)

# batch, heads, queries, width, keys, key heads, causal, mask bytes, dropout, type, direction, us.
ATTENTIONS = (
    (48, 12, 1500, 64, 1500, 12, False, 0, 0.0, "bf16", "backward-data", 2316.5),
    (1, 8, 1120, 160, 1120, 1, False, 0, 0.0, "fp16", "forward", 27.201),
    (2, 16, 224, 192, 224, 4, False, 0, 0.0, "bf16", "forward", 10.463),
    (1, 12, 448, 64, 448, 12, False, 0, 0.0, "bf16", "backward-data", 19.457),
    (8, 32, 2048, 64, 2048, 8, True, 0, 0.0, "bf16", "forward", 347.2),
    (12, 32, 512, 128, 512, 32, True, 0, 0.0, "bf16", "backward-data", 304.64),
    (12, 14, 2048, 64, 2048, 2, True, 0, 0.0, "fp16", "backward-data", 737.86),
    (2, 32, 2048, 64, 2048, 8, True, 0, 0.0, "bf16", "forward", 99.392),
    (6, 32, 2048, 128, 2048, 32, True, 0, 0.0, "fp16", "forward", 386.94),
    (8, 20, 4680, 80, 128, 20, False, 0, 0.0, "bf16", "backward-data", 613.44),
    (4, 4, 319, 33, 319, 4, True, 0, 0.1, "bf16", "forward", 26.397),
    (2, 14, 1024, 64, 1024, 2, True, 0, 0.0, "fp16", "backward-data", 62.977),
)

# Batch, channels in and out, image, kernel, stride, padding, groups, type, channels last, direction, us.
CONVOLUTIONS = (
    (48, 256, 256, 56, 3, 2, 1, 32, "bf16", True, "forward", 43.39),
    (128, 64, 16, 55, 1, 1, 0, 1, "fp32", True, "forward", 163.65),
    (16, 192, 384, 28, 2, 2, 0, 1, "bf16", False, "backward-weight", 24.03),
    (32, 184, 80, 14, 1, 1, 0, 1, "tf32", True, "forward", 6.4),
    (64, 256, 128, 28, 1, 1, 0, 1, "fp16", False, "backward-weight", 19.552),
    (96, 25, 114, 32, 3, 1, 1, 1, "fp32", True, "backward-data", 263.87),
    (64, 16, 64, 55, 3, 1, 1, 1, "tf32", True, "backward-weight", 120.09),
    (192, 116, 116, 14, 3, 1, 1, 116, "bf16", True, "forward", 13.057),
    (16, 384, 48, 13, 1, 1, 0, 1, "fp16", False, "forward", 8.447),
    (8, 3, 64, 224, 11, 4, 2, 1, "bf16", True, "forward", 51.456),
    (8, 128, 8, 224, 1, 2, 0, 1, "bf16", False, "backward-weight", 116.25),
    (96, 256, 256, 64, 3, 2, 1, 2, "bf16", True, "forward", 90.431),
    (256, 128, 32, 27, 1, 1, 0, 1, "bf16", True, "backward-data", 21.567),
    (2, 736, 128, 7, 1, 1, 0, 1, "bf16", True, "backward-data", 2.56),
    (24, 480, 20, 1, 1, 1, 0, 1, "bf16", True, "forward", 5.12),
    (32, 16, 64, 112, 1, 1, 0, 1, "bf16", False, "backward-weight", 21.824),
    (48, 640, 640, 32, 3, 2, 1, 1, "fp16", True, "forward", 124.61),
    (2, 4, 22, 96, 5, 1, 2, 1, "tf32", True, "forward", 14.048),
    (32, 256, 256, 14, 3, 1, 1, 1, "fp32", False, "forward", 251.81),
    (4, 256, 256, 64, 3, 2, 1, 2, "bf16", True, "backward-weight", 43.808),
    (8, 384, 128, 28, 1, 1, 0, 1, "fp16", True, "backward-data", 4.576),
    (32, 32, 128, 27, 1, 1, 0, 1, "fp16", True, "backward-weight", 7.616),
    (8, 4, 40, 80, 1, 1, 0, 4, "bf16", True, "backward-weight", 105.54),
    (4, 256, 512, 16, 3, 1, 1, 1, "tf32", True, "forward", 20.416),
)

# Any product, aligned or not.
SIZES = st.integers(1, 20_000)
ANY = st.one_of(
    st.builds(
        Gemm,
        m=SIZES,
        n=SIZES,
        k=SIZES,
        dtype=st.sampled_from(["bf16", "fp16", "tf32", "fp32", "fp8", "int8"]),
        layout=st.sampled_from(["TN", "NN", "NT", "TT"]),
        batch=st.integers(1, 64),
    ),
    st.builds(
        Attention,
        batch=st.integers(1, 64),
        num_heads=st.integers(1, 64),
        seq_len=st.integers(1, 8192),
        head_dim=st.integers(1, 256),
        is_causal=st.booleans(),
        direction=st.sampled_from(["forward", "backward-data"]),
    ),
    st.builds(
        Conv2d,
        batch=st.integers(1, 256),
        in_channels=st.integers(1, 1024),
        out_channels=st.integers(1, 1024),
        input_size=st.integers(7, 224),
        kernel_size=st.sampled_from([1, 3, 5, 7]),
        stride=st.sampled_from([1, 2]),
        channels_last=st.booleans(),
        direction=st.sampled_from(["forward", "backward-data", "backward-weight"]),
    ),
    st.builds(
        Streaming,
        role=st.sampled_from(["pointwise", "copy", "softmax", "normalization", "reduction", "sort"]),
        elements=st.integers(0, 10**9),
        read_bytes=st.integers(0, 10**9),
        write_bytes=st.integers(0, 10**9),
        inner=st.integers(0, 4096),
        strided=st.booleans(),
    ),
)


def test_what_is_told_apart_has_an_interval_of_its_own() -> None:
    """Depthwise and grouped convolutions on an H100, whose networks miss these by less and by more."""
    device = priced("h100-sxm")
    net = device.calibration.networks["conv"]
    depthwise, dense = (Conv2d(32, 256, 256, (28, 28), (3, 3), groups=groups) for groups in (256, 1))
    for op, (low, high) in ((depthwise, net.apart["depthwise"]), (dense, net.quantiles)):
        told = estimate(op, device)
        below, above = np.log(told.low_s / told.time_s), np.log(told.high_s / told.time_s)
        assert above / below == pytest.approx(high / low, rel=1e-3)


@given(ANY)
@settings(max_examples=200, deadline=None)
def test_the_floor_holds_and_the_interval_is_ordered(op: Op) -> None:
    predicted = estimate(op, H200)
    assert predicted.provenance == ESTIMATED
    assert least_s(op, H200) <= predicted.low_s <= predicted.time_s <= predicted.high_s < inf


def products(rows: tuple[tuple[object, ...], ...]) -> tuple[list[Gemm], list[float]]:
    ops = [
        Gemm(m, n, k, dtype, layout, batch, ld_a=ld_a, bias=bias)  # type: ignore[arg-type]
        for m, n, k, dtype, layout, batch, ld_a, bias, _ in rows
    ]
    return ops, [float(row[-1]) for row in rows]  # type: ignore[arg-type]


def mean_error(ops: list[Op], measured_us: list[float]) -> float:
    predicted = estimate_all(ops, H200)
    return fmean(abs(p.time_s * 1e6 / us - 1) for p, us in zip(predicted, measured_us, strict=True))


@pytest.mark.parametrize(("rows", "bar"), [(PRODUCTS[:12], 0.08), (PRODUCTS[12:], 0.12)])
def test_products_it_never_saw(rows: tuple[tuple[object, ...], ...], bar: float) -> None:
    ops, measured_us = products(rows)
    assert mean_error(list(ops), measured_us) < bar


def test_attention_it_never_saw() -> None:
    ops: list[Op] = [
        Attention(
            b, h, s, d, kv, hkv, is_causal=causal, mask_bytes=mask, dropout_p=p, dtype=dtype, direction=way
        )
        for b, h, s, d, kv, hkv, causal, mask, p, dtype, way, _ in ATTENTIONS
    ]
    assert mean_error(ops, [row[-1] for row in ATTENTIONS]) < 0.12


def convolutions() -> list[Op]:
    return [
        Conv2d(b, c, k, size, r, step, pad, groups=g, dtype=dtype, channels_last=last, direction=way)
        for b, c, k, size, r, step, pad, g, dtype, last, way, _ in CONVOLUTIONS
    ]


def test_convolutions_it_never_saw() -> None:
    assert mean_error(convolutions(), [row[-1] for row in CONVOLUTIONS]) < 0.2


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-3, 3)), min_size=1, max_size=12))
def test_of_several_ways_the_time_stated_is_the_one_that_errs_least(ways: list[tuple[float, float]]) -> None:
    times, logits = np.array([ways], dtype=np.float32).transpose(2, 0, 1)
    odds = np.exp(logits / SOFTENED)

    def expected_error(logarithm: float) -> float:
        return float((odds * np.abs(np.exp(logarithm - times) - 1)).sum())

    best = min(expected_error(each) for each in times[0])
    assert expected_error(least_error(times, logits)[0]) == pytest.approx(best, rel=1e-3, abs=1e-5)


def test_it_beats_the_analytic_stage_on_them() -> None:
    ops, measured_us = products(PRODUCTS)
    first = [analytic(op, H200).time_s for op in ops]
    error = fmean(abs(t * 1e6 / us - 1) for t, us in zip(first, measured_us, strict=True))
    assert mean_error(list(ops), measured_us) < error / 1.5


@pytest.mark.parametrize(
    ("odd", "least", "most"),
    [
        # Warm and sustained, an H200 took 2.4 to 2.7 times the aligned product's time with an even size and
        # 4.9 to 7.3 with an odd one, where the aligned product took 194 to 214 us. Cold and in short bursts,
        # as fitted, that one takes 172 to 175 us: the same times are then 2.8 to 3.1 and 5.7 to 8.6.
        (Gemm(4096, 4090, 4096, layout="TN"), 2.3, 3.7),
        (Gemm(4096, 4096, 4090, layout="NN"), 2.3, 3.7),
        (Gemm(4096, 4089, 4096, layout="NN"), 4.8, 8.6),
        (Gemm(4096, 4089, 4096, layout="TN"), 4.8, 8.6),
        (Gemm(4089, 4096, 4096, layout="TN"), 0.95, 1.1),  # m is contiguous nowhere
    ],
)
def test_what_misalignment_costs(odd: Gemm, least: float, most: float) -> None:
    aligned = Gemm(4096, 4096, 4096, layout=odd.layout)
    assert least < estimate(odd, H200).time_s / estimate(aligned, H200).time_s < most


def test_the_kernels_it_names() -> None:
    aligned, odd = estimate(Gemm(4096, 4096, 4096), H200), estimate(Gemm(4096, 4089, 4096), H200)
    assert aligned.kernel_family == "sm90"
    assert odd.kernel_family in ("sm75", "sm80")
    assert aligned.tile == (128, 256)
    assert aligned.waves == pytest.approx(32 * 16 / 132)


@given(st.integers(4, 200), st.integers(4, 128), st.integers(4, 128), st.sampled_from("mnk"))
@settings(max_examples=150, deadline=None)
def test_healthy_sizes_gain_nothing_from_the_next_multiple_of_64(m: int, n: int, k: int, name: str) -> None:
    sizes = {"m": 64 * m, "n": 64 * n, "k": 64 * k}
    larger = sizes | {name: sizes[name] + 64}
    assert estimate(Gemm(**larger), H200).time_s > 0.93 * estimate(Gemm(**sizes), H200).time_s


def test_what_was_not_measured_keeps_the_analytic_stage() -> None:
    for op in (Gemm(512, 512, 512, "fp64"), Streaming("collective", 1000, 4000, 4000)):
        assert estimate(op, H200) == analytic(op, H200)
    for op in (Gemm(512, 512, 512), Conv2d(8, 64, 64, 56, 3), Attention(2, 8, 128, 64)):
        assert estimate(op, "a100") == analytic(op, priced("a100"))


def test_the_table_is_small_and_says_where_it_is_from() -> None:
    assert TABLE.stat().st_size <= 3 * 2**20
    about = read(TABLE).about
    assert about["gpu"] == "h200"
    assert {"torch", "cuda", "cudnn", "driver"} <= set(about["versions"])
    assert about["collected"]


def test_numbers_kept_as_their_bytes_are_the_numbers() -> None:
    with np.load(TABLE) as arrays:
        kept = {key: arrays[key] for key in arrays.files}
    facts = json.loads(str(kept["about"]))["networks"]["gemm"]
    shipped = network(kept, "gemm", facts)
    assert kept["gemm/mean"].dtype == np.uint8
    kept["gemm/mean"] = shipped.mean
    kept["gemm/low"] = number_bytes(shipped.low)
    again = network(kept, "gemm", facts)
    assert np.array_equal(again.mean, shipped.mean)
    assert np.array_equal(again.low, shipped.low)


def test_a_damaged_table_is_reported(tmp_path: Path) -> None:
    whole = TABLE.read_bytes()
    with np.load(TABLE) as arrays:
        wrong = {key: arrays[key] for key in arrays.files}
    shape = wrong["gemm/mean"].shape[:-1]
    wrong["gemm/mean"] = number_bytes(np.full(shape, np.nan, np.float32))
    np.savez(tmp_path / "nan.npz", **wrong)
    np.savez(tmp_path / "bare.npz", about=np.array(json.dumps({})))
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ("nan", "bare", "cut", "empty"):
        with pytest.raises(TilefitError, match="calibration cannot be read") as error:
            read(tmp_path / f"{name}.npz")
        assert name in error.value.where


def test_hundreds_of_new_shapes_take_milliseconds() -> None:
    estimate(Gemm(64, 64, 64), H200)  # reads the table
    best = inf
    for attempt in range(3):
        ops = [Gemm(1000 + i, 1024, 512 + attempt) for i in range(300)]
        began = time.thread_time()
        estimate_all(ops * 50, H200)
        best = min(best, time.thread_time() - began)
    assert best < 0.25  # 15,000 operations, 300 of them different; about 40 ms on an idle core
