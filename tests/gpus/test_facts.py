"""Every GPU's numbers agree with each other and with what its maker publishes."""

import pytest

from tilefit import gpus
from tilefit.gpus import Gpu

ALL = [gpus.get(name) for name in gpus.names()]


@pytest.fixture(params=ALL, ids=lambda gpu: gpu.name)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return request.param


def test_peaks_follow_from_sms_clock_and_flop_per_clock(gpu: Gpu) -> None:
    derived = {dtype: gpu.peak_flop_per_s(dtype) for dtype in gpu.datasheet_peak_flop_per_s}
    assert derived == pytest.approx(dict(gpu.datasheet_peak_flop_per_s), rel=0.01)


def test_every_rate_is_checked_against_a_datasheet() -> None:
    published: dict[tuple[tuple[int, int], tuple[tuple[str, int], ...]], set[str]] = {}
    for gpu in ALL:
        rates = tuple(sorted(gpu.flop_per_clock_per_sm.items()))
        published.setdefault((gpu.compute_capability, rates), set()).update(gpu.datasheet_peak_flop_per_s)
    for (_, rates), dtypes in published.items():
        # The rate of fp64 is 1/32 or 1/64 of fp32 on parts whose datasheets leave it out.
        assert {dtype for dtype, rate in rates if (dtype, rate) != ("fp64", 4)} <= dtypes


def test_bandwidth_is_bus_width_times_data_rate(gpu: Gpu) -> None:
    derived = gpu.memory_bus_width_bits * gpu.memory_data_rate_bits_per_s / 8
    assert gpu.memory_bandwidth_bytes_per_s == derived
    assert derived == pytest.approx(gpu.datasheet_bandwidth_bytes_per_s, rel=0.01)


def test_types_keep_the_ratios_of_the_hardware(gpu: Gpu) -> None:
    rate = gpu.flop_per_clock_per_sm
    if "bf16" in rate:
        assert rate["bf16"] == rate["fp16"] == 2 * rate["tf32"]
    if "fp8" in rate:
        assert rate["fp8"] == 2 * rate["fp16"]
    if "int8" in rate:  # GeForce halves what accumulates in fp32, and int8 does not.
        assert rate["int8"] == rate["fp16"] * (4 if "GeForce" in gpu.title else 2)


def test_types_exist_from_the_generation_that_brought_them(gpu: Gpu) -> None:
    generations = ["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"]
    since = {"fp16": "volta", "int8": "turing", "bf16": "ampere", "tf32": "ampere", "fp8": "ada"}
    age = generations.index(gpu.architecture)
    expected = {dtype for dtype, first in since.items() if generations.index(first) <= age}
    if gpu.compute_capability == (10, 3):  # whose few int8 units have no published rate
        expected.remove("int8")
    assert {dtype for dtype in since if gpu.supports(dtype)} == expected


# Sparse figures are twice these; one slipped in would stand out.
@pytest.mark.parametrize(
    ("name", "dtype", "dense_flop_per_s"),
    [
        ("a100-sxm-80gb", "fp16", 312e12),
        ("h100-sxm", "bf16", 989.4e12),
        ("h100-sxm", "tf32", 494.7e12),
        ("h100-pcie", "bf16", 756e12),
        ("h100-nvl", "bf16", 835e12),
        ("h200", "bf16", 989.4e12),
        ("h200", "fp8", 1979e12),
        ("h200", "fp32", 67e12),
        ("b200", "bf16", 2250e12),
        ("l4", "bf16", 121e12),
        ("l40s", "fp8", 733e12),
        # With fp32 accumulation; 330e12, 142e12, 108e12 and 419e12 with fp16.
        ("rtx-4090", "fp16", 165.2e12),
        ("rtx-3090", "fp16", 71e12),
        ("rtx-2080-ti", "fp16", 53.8e12),
        ("rtx-5090", "fp16", 209.5e12),
        ("rtx-2080", "fp16", 40.3e12),
        ("rtx-3080", "fp16", 59.5e12),
        ("rtx-4080", "fp16", 97.5e12),
        ("rtx-5080", "fp16", 112.6e12),
        # From AI TOPS: 242 of sparse int8 for the RTX 4060, 988 of sparse fp4 for the RTX 5070.
        ("rtx-3060", "fp16", 25.5e12),
        ("rtx-4060", "int8", 121e12),
        ("rtx-4070", "fp16", 58.3e12),
        ("rtx-5070", "int8", 247e12),
        # 47.0e12 was measured (BLACKWALL's cuBLAS products on an RTX 5060 Ti), and 92e12 on a GB10.
        ("rtx-5060-ti", "bf16", 47.4e12),
        ("gb10", "bf16", 124e12),
        # Data-centre and workstation parts accumulate in fp32 at the full rate.
        ("quadro-rtx-6000", "fp16", 130.5e12),
        ("rtx-a6000", "bf16", 154.8e12),
        ("a40", "bf16", 149.7e12),
        ("h20", "bf16", 148e12),
        ("gb200", "bf16", 2500e12),
        ("t4", "fp16", 65e12),
        ("a10", "bf16", 125e12),
        ("rtx-4000-ada", "bf16", 106.9e12),
        # But not these two, by their own datasheets.
        ("l40", "bf16", 181e12),
        ("l20", "bf16", 119.5e12),
    ],
)
def test_peaks_are_dense_and_accumulate_in_fp32(name: str, dtype: str, dense_flop_per_s: float) -> None:
    assert gpus.get(name).peak_flop_per_s(dtype) == pytest.approx(dense_flop_per_s, rel=0.01)


# NVIDIA, "GPU Performance Background": V100 139 FLOP per byte in fp16; the same arithmetic for the A100s.
@pytest.mark.parametrize(
    ("name", "flop_per_byte"),
    [("v100-sxm2-16gb", 138.9), ("a100-sxm-80gb", 153.0), ("a100-sxm-40gb", 200.6)],
)
def test_ops_per_byte_of_the_performance_guide(name: str, flop_per_byte: float) -> None:
    gpu = gpus.get(name)
    published = gpu.datasheet_peak_flop_per_s["fp16"] / gpu.datasheet_bandwidth_bytes_per_s
    assert round(published, 1) == flop_per_byte
    assert gpu.ops_per_byte("fp16") == pytest.approx(flop_per_byte, rel=0.005)


# NVIDIA, "GPU Performance Background", for the V100 and A100; the others from their architecture papers or
# reviews.
@pytest.mark.parametrize(
    ("name", "sms", "l2_mib"),
    [
        ("v100-sxm2-16gb", 80, 6),
        ("a100-sxm-80gb", 108, 40),
        ("h100-sxm", 132, 50),
        ("h100-pcie", 114, 50),
        ("h200", 132, 60),
        ("b200", 148, 126.5),
        ("l40s", 142, 96),
        ("rtx-4070-super", 56, 48),
        ("rtx-4070", 46, 36),
    ],
)
def test_sms_and_l2(name: str, sms: int, l2_mib: float) -> None:
    assert (gpus.get(name).sms, gpus.get(name).l2_bytes / 2**20) == (sms, l2_mib)


def test_a_type_without_a_fast_path_runs_on_the_fp32_pipelines() -> None:
    p100, v100 = gpus.get("p100"), gpus.get("v100")
    assert p100.peak_flop_per_s("fp16") == p100.peak_flop_per_s("fp32")
    assert v100.peak_flop_per_s("bf16") == v100.peak_flop_per_s("fp32")
    assert gpus.get("a100").peak_flop_per_s("fp64") == gpus.get("a100").peak_flop_per_s("fp32")


def test_the_highest_clock_is_not_always_the_one_of_the_tensor_cores() -> None:
    assert gpus.get("h200").boost_clock_hz == 1.83e9
    assert gpus.get("h200").clock_hz_by_dtype["fp32"] == 1.98e9
    assert not gpus.get("a100").clock_hz_by_dtype


def test_shared_memory_is_that_of_the_compute_capability() -> None:
    # CUDA C++ Programming Guide, technical specifications per compute capability, in KiB.
    per_sm = {(6, 0): 64, (7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100}
    per_sm |= {(9, 0): 228, (10, 0): 228, (10, 3): 228, (12, 0): 100, (12, 1): 100}
    for gpu in ALL:
        assert gpu.shared_memory_bytes_per_sm == per_sm[gpu.compute_capability] * 1024, gpu.name


def test_every_number_has_a_source(gpu: Gpu) -> None:
    numbers = {"sms", "boost_clock_hz", "flop_per_clock_per_sm", "memory_bytes", "memory_bus_width_bits"}
    numbers |= {"memory_data_rate_bits_per_s", "l2_bytes", "shared_memory_bytes_per_sm", "compute_capability"}
    numbers |= {"datasheet"} | ({"clock_hz"} if gpu.clock_hz_by_dtype else set())
    numbers |= {"link"} if gpu.link else set()
    assert gpu.sources.keys() == numbers
