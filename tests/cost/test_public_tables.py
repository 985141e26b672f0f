"""The shipped constants against published times: a sample, and the whole tables where they are at hand."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from tilefit import gpus
from tilefit.cost.analytic import analytic
from tilefit.gpus import Gpu
from tilefit.ops import Attention, Gemm, Op

SAMPLE = Path(__file__).parents[1] / "data" / "published_times.csv"
TABLES = Path(__file__).resolve().parents[3] / "shared" / "data"
#: Of the whole tables every so many-th row, for speed.
EVERY = 37


def sampled(gpu: Gpu, operation: str) -> Iterator[tuple[Op, float]]:
    """(operation, seconds) of a GPU."""
    with SAMPLE.open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if (row["gpu"], row["operation"]) == (gpu.name, operation):
                sizes = [int(size) for size in row["sizes"].split()]
                yield (Gemm if operation == "product" else causal)(*sizes), float(row["us"]) * 1e-6


def whole(gpu: Gpu, operation: str) -> Iterator[tuple[Op, float]]:
    """As :func:`sampled`, of a whole table."""
    table = {"product": "gemm_bf16", "attention": "attention_prefill"}[operation]
    short = gpu.name.partition("-")[0]
    if not (TABLES / f"public_{table}_{short}.csv.gz").is_file():
        pytest.skip("the whole tables are not part of the package")
    with gzip.open(TABLES / f"public_{table}_{short}.csv.gz", "rt", newline="") as file:
        for row in list(csv.DictReader(file))[::EVERY]:
            # A shape held by one or two runs says little where the others are held by ten.
            few = short != "a100" and int(row["runs"]) < 5
            names = ("batch", "heads", "kv_heads", "seq", "head_dim")
            if operation == "attention" and row["kernel"] == "fa3":
                yield causal(*(int(row[name]) for name in names)), float(row["us"]) * 1e-6
            elif operation == "product" and row["m"] != "0" and not few:
                yield Gemm(int(row["m"]), int(row["n"]), int(row["k"])), float(row["us"]) * 1e-6


def causal(batch: int, heads: int, kv_heads: int, seq: int, head_dim: int) -> Attention:
    return Attention(batch, heads, seq, head_dim, num_kv_heads=kv_heads, is_causal=True)


def errors(rows: Iterator[tuple[Op, float]], gpu: Gpu) -> tuple[list[float], list[bool]]:
    """Relative errors in per cent, and whether the interval holds the time."""
    times = [(analytic(op, gpu), measured_s) for op, measured_s in rows]
    return (
        [100 * abs(predicted.time_s / measured_s - 1) for predicted, measured_s in times],
        [predicted.low_s <= measured_s <= predicted.high_s for predicted, measured_s in times],
    )


PRODUCTS = [("a100", 9.0), ("h100", 7.0), ("h200", 7.0), ("l40s", 13.0)]
ATTENTION = [("h100", 17.0), ("h200", 14.0)]


@pytest.mark.parametrize(("name", "bar"), PRODUCTS)
def test_bf16_products(name: str, bar: float) -> None:
    gpu = gpus.get(name)
    wrong, inside = errors(whole(gpu, "product"), gpu)
    assert len(wrong) > 900
    assert fmean(wrong) < bar
    assert 0.75 < fmean(inside) < 0.88


@pytest.mark.parametrize(("name", "bar"), ATTENTION)
def test_causal_attention(name: str, bar: float) -> None:
    gpu = gpus.get(name)
    assert fmean(errors(whole(gpu, "attention"), gpu)[0]) < bar


#: The mean of a dozen rows strays from that of a table; every clone can test these.
SAMPLED = [("product", 12, *of) for of in PRODUCTS] + [("attention", 10, *of) for of in ATTENTION]


@pytest.mark.parametrize(("operation", "number", "name", "bar"), SAMPLED)
def test_a_sample(operation: str, number: int, name: str, bar: float) -> None:
    gpu = gpus.get(name)
    wrong, inside = errors(sampled(gpu, operation), gpu)
    assert len(wrong) == number
    assert fmean(wrong) < 1.25 * bar
    assert fmean(inside) > 0.65
