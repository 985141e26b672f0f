"""The shipped constants against the published tables, where those are at hand (a subsample, for speed)."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from statistics import fmean

import pytest

from tilefit import gpus
from tilefit.cost.model import analytic
from tilefit.ops import Attention, Gemm

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(
    not (DATA / "README.md").is_file(), reason="the published tables are not part of the package"
)


def rows(name: str, every: int) -> list[dict[str, str]]:
    with gzip.open(DATA / f"{name}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))[::every]


@pytest.mark.parametrize(
    ("gpu", "table", "bar"),
    [("a100", "a100", 9.0), ("h100", "h100", 7.0), ("h200", "h200", 7.0), ("l40s", "l40s", 18.0)],
)
def test_bf16_products(gpu: str, table: str, bar: float) -> None:
    errors, inside = [], []
    for row in rows(f"public_gemm_bf16_{table}", 37):
        # A shape held by one or two runs says little where the others are held by ten.
        if row["m"] == "0" or (gpu != "a100" and int(row["runs"]) < 5):
            continue
        predicted = analytic(Gemm(int(row["m"]), int(row["n"]), int(row["k"])), gpus.get(gpu))
        measured_s = float(row["us"]) * 1e-6
        errors.append(100 * abs(predicted.time_s / measured_s - 1))
        inside.append(predicted.low_s <= measured_s <= predicted.high_s)
    assert len(errors) > 900
    assert fmean(errors) < bar
    assert 0.75 < fmean(inside) < 0.88


@pytest.mark.parametrize(("gpu", "bar"), [("h100", 17.0), ("h200", 14.0)])
def test_causal_attention(gpu: str, bar: float) -> None:
    errors = []
    for row in rows(f"public_attention_prefill_{gpu}", 37):
        if row["kernel"] != "fa3":
            continue
        op = Attention(
            int(row["batch"]),
            int(row["heads"]),
            int(row["seq"]),
            int(row["head_dim"]),
            num_kv_heads=int(row["kv_heads"]),
            is_causal=True,
        )
        errors.append(100 * abs(analytic(op, gpus.get(gpu)).time_s / (float(row["us"]) * 1e-6) - 1))
    assert fmean(errors) < bar
