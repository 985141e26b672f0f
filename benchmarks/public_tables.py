"""Error of the cost model on published tables: GEMM, attention and convolution on eleven GPUs.

    python benchmarks/public_tables.py [--data DIR] [--constants]

Prints a table and records it in ``benchmarks/results/public_tables.json``. ``--constants`` refits the
constants of ``tilefit.cost.constants`` and prints them. The tables (DeepBench, aiconfigurator, NeuSight) are
not part of the package; the script needs their directory.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from random import Random
from statistics import fmean, median, quantiles

from tilefit import gpus
from tilefit.cost import estimate
from tilefit.cost.attention import estimate_attention
from tilefit.cost.constants import CARDS, GDDR_CAPABILITIES, GENERAL, Constants
from tilefit.cost.constants import constants as constants_of
from tilefit.cost.conv import estimate_conv
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.launch import GRAPHED_S
from tilefit.cost.priced import left_out
from tilefit.gpus import Gpu
from tilefit.measure.fitting import RANGES, Measured, fit
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Attention, Conv2d, Gemm

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "public_tables.json"

#: Table by GPU.
BF16 = {"a100-sxm-80gb": "a100", "h100-sxm": "h100", "h200": "h200", "l40s": "l40s"}
#: Whose products fetch by their own threads: of the bandwidth they reach what the others of them do.
WITHOUT_TMA = ("a100-sxm-80gb", "l40s")
#: Fitted jointly for a GPU that is left out: those with HBM.
HBM = ("a100-sxm-80gb", "h100-sxm", "h200")
HOPPER = ("h100-sxm", "h200")
FP32 = {
    "a100_pcie_40": "a100-pcie-40gb",
    "a100_pcie_80": "a100-pcie-80gb",
    "h100_sxm": "h100-sxm",
    "l4": "l4",
    "t4": "t4",
    "v100_pcie": "v100-pcie-16gb",
    "p100_pcie": "p100-pcie-16gb",
}
FIT_ROWS = 200
CALIBRATION_ROWS = 100
#: A network is asked for each: evenly spaced ones will do.
PRICED_ROWS = 3000


def read(path: Path) -> Iterable[dict[str, str]]:
    """The rows of a CSV file, compressed or not."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return csv.DictReader(text.splitlines())


def bf16_table(data: Path, name: str) -> list[Measured]:
    """The bf16 products of a GPU; shapes held by few runs are dropped where most are held by many."""
    rows = [row for row in read(data / f"public_gemm_bf16_{BF16[name]}.csv.gz") if row["m"] != "0"]
    most = median(int(row["runs"]) for row in rows)
    gpu = gpus.get(name)
    return [
        Measured(Gemm(int(row["m"]), int(row["n"]), int(row["k"])), gpu, float(row["us"]) * 1e-6)
        for row in rows
        if int(row["runs"]) >= most / 2
    ]


def scores(pairs: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Errors in per cent, and the 10th and 90th percentile of predicted over measured."""
    ratios = [predicted / measured for predicted, measured in pairs]
    errors = sorted(100 * abs(ratio - 1) for ratio in ratios)
    low, *_, high = quantiles(ratios, n=10)
    return {
        "rows": len(ratios),
        "mape": round(fmean(errors), 1),
        "median": round(median(errors), 1),
        "p90": round(quantiles(errors, n=10)[-1], 1),
        "ratio_p10": round(low, 2),
        "ratio_p90": round(high, 2),
    }


def inside(rows: Sequence[tuple[float, float, float]]) -> float:
    """Share of measured times inside the stated interval, from (low, high, measured)."""
    return round(100 * fmean(low <= measured <= high for low, high, measured in rows), 1)


def gemm_scores(rows: Sequence[Measured], constants: Constants) -> dict[str, float]:
    estimates = [estimate_gemm(row.gemm, row.gpu, constants) for row in rows]
    return scores((e.time_s, row.time_s) for e, row in zip(estimates, rows, strict=True)) | {
        "inside": inside([(e.low_s, e.high_s, r.time_s) for e, r in zip(estimates, rows, strict=True)])
    }


def priced_scores(rows: Sequence[Measured]) -> dict[str, float]:
    """By the H200's calibration, which no table was used for, and what a replayed graph adds to a kernel: its
    products are single ones, those of the tables follow each other."""
    estimates = [(estimate(row.gemm, left_out(row.gpu)), row.time_s - GRAPHED_S) for row in rows]
    return scores((each.time_s + GRAPHED_S, time_s + GRAPHED_S) for each, time_s in estimates) | {
        "inside": inside([(each.low_s, each.high_s, time_s) for each, time_s in estimates])
    }


def _every(rows: Sequence[Measured]) -> Sequence[Measured]:
    return rows[:: max(1, len(rows) // PRICED_ROWS)]


def roofline(rows: Sequence[Measured]) -> dict[str, float]:
    def predict(gemm: Gemm, gpu: Gpu) -> float:
        return max(
            gemm.flop / gpu.peak_flop_per_s(gemm.dtype), gemm.moved_bytes / gpu.memory_bandwidth_bytes_per_s
        )

    return scores((predict(row.gemm, row.gpu), row.time_s) for row in rows)


def spread_out(rows: Sequence[Measured], start: Constants, count: int) -> list[int]:
    """Rows to calibrate on: evenly spaced in the order of their predicted times."""
    order = sorted(range(len(rows)), key=lambda i: estimate_gemm(rows[i].gemm, rows[i].gpu, start).time_s)
    return [order[int((i + 0.5) * len(order) / count)] for i in range(count)]


def sample(rows: Sequence[Measured], count: int = FIT_ROWS) -> list[Measured]:
    return Random(0).sample(rows, min(count, len(rows)))


def prior(tables: dict[str, list[Measured]], names: Iterable[str], gpu: Gpu) -> Constants:
    """Constants for a GPU from the tables of others."""
    rows = [row for name in names for row in sample(tables[name])]
    fitted = fit(rows, GENERAL)
    if gpu.name in WITHOUT_TMA:
        (other,) = (name for name in WITHOUT_TMA if name != gpu.name)
        theirs = of_kind(fitted, gpus.get(other))
        reached = fit(sample(tables[other]), theirs, ["memory_efficiency"], iterations=60).memory_efficiency
        fitted = replace(fitted, memory_efficiency=reached)
    return of_kind(fitted, gpu)


def of_kind(fitted: Constants, gpu: Gpu) -> Constants:
    """Constants for a GPU whose clocks its power budget may not sustain."""
    if gpu.compute_capability in GDDR_CAPABILITIES:
        return replace(fitted, math_efficiency=CARDS["GDDR"]["math_efficiency"])
    return fitted


def bf16(data: Path, show: Callable[[str, dict[str, float]], None]) -> None:
    tables = {name: bf16_table(data, name) for name in BF16}
    for name, rows in tables.items():
        gpu = gpus.get(name)
        show(f"gemm bf16 {name}: roofline", roofline(rows))
        others = [other for other in HBM if other != name]
        start = prior(tables, others, gpu)
        show(f"gemm bf16 {name}: datasheet, from {' '.join(others)}", gemm_scores(rows, start))
        if name in HOPPER:
            older = [other for other in others if other not in HOPPER]
            start = prior(tables, older, gpu)
            show(f"gemm bf16 {name}: datasheet, from {' '.join(older)}", gemm_scores(rows, start))
            show(f"gemm bf16 {name}: from the H200's calibration", priced_scores(_every(rows)))
        chosen = set(spread_out(rows, start, CALIBRATION_ROWS))
        fitted = fit([rows[i] for i in sorted(chosen)], start)
        rest = [row for i, row in enumerate(rows) if i not in chosen]
        show(f"gemm bf16 {name}: calibrated on {CALIBRATION_ROWS} rows", gemm_scores(rest, fitted))
        show(f"gemm bf16 {name}: shipped constants", gemm_scores(rows, constants_of(gpu)))


def fp32(data: Path, show: Callable[[str, dict[str, float]], None]) -> None:
    """Plain fp32. Their times hold a launch, so small products are left out."""
    by_device: dict[tuple[str, str], list[Measured]] = {}
    for row in read(data / "public_fp32_linear_bmm.csv.gz"):
        if row["device"] not in FP32:
            continue
        gemm = Gemm(int(row["m"]), int(row["n"]), int(row["k"]), "fp32", batch=int(row["batch"]))
        measured = Measured(gemm, gpus.get(FP32[row["device"]]), float(row["us"]) * 1e-6)
        if measured.time_s > 200e-6:
            by_device.setdefault((row["device"], row["kind"]), []).append(measured)
    for (device, kind), rows in by_device.items():
        show(f"fp32 {kind} {device}: roofline", roofline(rows))
        show(f"fp32 {kind} {device}", gemm_scores(rows, constants_of(rows[0].gpu)))


def deepbench_gemm(data: Path, show: Callable[[str, dict[str, float]], None]) -> None:
    """Products on cuBLAS 10; misaligned ones, which the benchmark pads, say nothing and are left out."""
    columns = {
        "v100_mixed": ("v100-sxm2-16gb", "fp16"),
        "v100_fp32": ("v100-sxm2-16gb", "fp32"),
        "t4_mixed": ("t4", "fp16"),
        "p100_fp32": ("p100-pcie-16gb", "fp32"),
    }
    for column, (name, dtype) in columns.items():
        rows = []
        for row in read(data / "deepbench_gemm_train.csv"):
            rate = row[f"{column}_tflops"]
            # Column-major: C is m x n there, so n are our rows.
            gemm = Gemm(int(row["n"]), int(row["m"]), int(row["k"]), dtype, row["op"])
            if rate and float(rate) and not any(o.leading_dimension % 8 for o in gemm.operands):
                rows.append(Measured(gemm, gpus.get(name), gemm.flop / (float(rate) * 1e12)))
        show(f"DeepBench GEMM {column}: roofline", roofline(rows))
        show(f"DeepBench GEMM {column}", gemm_scores(rows, constants_of(rows[0].gpu)))


def deepbench_conv(data: Path, show: Callable[[str, dict[str, float]], None]) -> None:
    passes = {"fwd": FORWARD, "dgrad": BACKWARD_DATA, "wgrad": BACKWARD_WEIGHT}
    columns = {
        "v100_mixed": ("v100-sxm2-16gb", "fp16"),
        "v100_fp32": ("v100-sxm2-16gb", "fp32"),
        "t4_mixed": ("t4", "fp16"),
        "t4_fp32": ("t4", "fp32"),
        "p100_fp32": ("p100-pcie-16gb", "fp32"),
    }
    table = list(read(data / "deepbench_conv_train.csv"))
    mixed: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for column, (name, dtype) in columns.items():
        gpu = gpus.get(name)
        for label, direction in passes.items():
            found = []
            for row in table:
                time_ms = row[f"{column}_{label}_ms"]
                if not time_ms:
                    continue
                conv = Conv2d(
                    int(row["n"]),
                    int(row["c"]),
                    int(row["k"]),
                    (int(row["h"]), int(row["w"])),
                    (int(row["r"]), int(row["s"])),
                    (int(row["stride_h"]), int(row["stride_w"])),
                    (int(row["pad_h"]), int(row["pad_w"])),
                    dtype=dtype,
                    channels_last=dtype == "fp16",
                    direction=direction,
                )
                found.append((estimate_conv(conv, gpu, constants_of(gpu)), float(time_ms) * 1e-3))
            pairs = [(each.time_s, time_s) for each, time_s in found]
            held = inside([(each.low_s, each.high_s, time_s) for each, time_s in found])
            show(f"DeepBench convolution {column} {label}", scores(pairs) | {"inside": held})
            mixed[column, label] = pairs
    # The factor of each pass before Ampere, from the other of the two GPUs.
    for column, other in (("v100_mixed", "t4_mixed"), ("t4_mixed", "v100_mixed")):
        for label in passes:
            factor = median(measured / predicted for predicted, measured in mixed[other, label])
            scaled = [(factor * predicted, measured) for predicted, measured in mixed[column, label]]
            show(f"DeepBench convolution {column} {label}, left out", scores(scaled))


def attention(data: Path, show: Callable[[str, dict[str, float]], None]) -> None:
    for name, table in (("h100-sxm", "h100"), ("h200", "h200")):
        gpu = gpus.get(name)
        rows = []
        for row in read(data / f"public_attention_prefill_{table}.csv.gz"):
            if row["kernel"] == "fa3":
                op = Attention(
                    int(row["batch"]),
                    int(row["heads"]),
                    int(row["seq"]),
                    int(row["head_dim"]),
                    num_kv_heads=int(row["kv_heads"]),
                    is_causal=True,
                )
                rows.append((estimate_attention(op, gpu, constants_of(gpu)), op, float(row["us"]) * 1e-6))
        for label, kept in (("", rows), (", 1024 and longer", [r for r in rows if r[1].seq_len >= 1024])):
            show(
                f"attention forward {name}{label}",
                scores((e.time_s, t) for e, _, t in kept)
                | {"inside": inside([(e.low_s, e.high_s, t) for e, _, t in kept])},
            )


def print_constants(data: Path) -> None:
    """The constants of ``tilefit.cost.constants``, fitted on all tables."""
    tables = {name: bf16_table(data, name) for name in BF16}
    general = fit([row for name in HBM for row in sample(tables[name])], GENERAL)
    hopper = fit([row for name in HOPPER for row in sample(tables[name])], general)
    named = {"GENERAL": general, "hopper": hopper}
    for name, rows in tables.items():
        start = hopper if name in HOPPER else general
        fitted = fit(sample(rows, 800), start)
        named[name] = fitted
    for name, constants in named.items():
        ratio = [
            log(row.time_s / estimate_gemm(row.gemm, row.gpu, constants).time_s)
            for row in sample(tables.get(name, tables["a100-sxm-80gb"]), 4000)
        ]
        low, *_, high = quantiles(ratio, n=10)
        print(name, {k: float(f"{v:.3g}") for k, v in asdict(constants).items() if k in RANGES}, (low, high))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="directory of the tables"
    )
    parser.add_argument("--constants", action="store_true", help="refit the constants and print them")
    arguments = parser.parse_args()
    if not (arguments.data / "deepbench_conv_train.csv").is_file():
        sys.exit(f"{arguments.data} has no published tables; name their directory with --data")
    if arguments.constants:
        print_constants(arguments.data)
        return
    results: dict[str, dict[str, float]] = {}

    def show(label: str, values: dict[str, float]) -> None:
        results[label] = values
        print(f"{label:64}", "  ".join(f"{k} {v:g}" for k, v in values.items()), flush=True)

    bf16(arguments.data, show)
    fp32(arguments.data, show)
    deepbench_gemm(arguments.data, show)
    deepbench_conv(arguments.data, show)
    attention(arguments.data, show)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
