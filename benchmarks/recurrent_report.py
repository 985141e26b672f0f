"""What benchmarks/recurrent.py recorded on an H200, as the tables of docs/recurrent.md.

python benchmarks/recurrent_report.py
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 8, 16, 64)


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}_h200.json").read_text("utf-8"))


def steps_table(rows: list[dict[str, Any]]) -> None:
    """Forward passes in bf16, from CUDA graphs, so that the host's launches are not timed."""
    print("bf16, forward, microseconds a step in a CUDA graph: cuDNN -> tilefit, by mini-batch")
    print(f"{'cell':5}{'hidden':>7}" + "".join(f"{batch:>15}" for batch in BATCHES))
    found = {(r["cell"], r["hidden"], r["batch"]): r for r in rows if r["dtype"] == "bf16"}
    for cell in ("lstm", "gru", "rnn"):
        for hidden in (256, 512, 1024, 2048):
            cells = [found[cell, hidden, batch] for batch in BATCHES]
            pairs = (
                "as cuDNN"
                if "refused" in row
                else f"{row['forward_cudnn_captured']:.1f} -> {row['forward_tilefit_captured']:.2f}"
                for row in cells
            )
            print(f"{cell:5}{hidden:>7}" + "".join(f"{pair:>15}" for pair in pairs))


def ratios(rows: list[dict[str, Any]]) -> None:
    plain = [row for row in rows if not row["cudnn_persists"]]
    kinds = {"forward": "forward", "both": "forward and backward"}
    print(f"\ncuDNN's time over tilefit's, geometric mean of {len(rows)} sizes, bf16 and fp16")
    for kind, name in kinds.items():
        for title, chosen, mode in (
            ("eager", rows, ""),
            ("eager, mini-batch <= 8, no persistent cuDNN", [r for r in plain if r["batch"] <= 8], ""),
            ("CUDA graphs, no persistent cuDNN", plain, "_captured"),
            ("eager, persistent cuDNN", [row for row in rows if row["cudnn_persists"]], ""),
        ):
            values = [row[f"{kind}_cudnn{mode}"] / row[f"{kind}_tilefit{mode}"] for row in chosen]
            slower = sum(value < 0.97 for value in values)
            print(f"{name:21} {title:45} {mean(values):5.2f}x   slower in {slower} of {len(values)}")
    eager, captured = (sum(row[name] == "cudnn" for row in rows) for name in ("backend", "backend_captured"))
    print(f"of {len(rows)} sizes cuDNN was chosen for {eager} of eager calls, for {captured} in CUDA graphs")


def absolute(rows: list[dict[str, Any]]) -> None:
    """Whole layers, with their input product, from CUDA graphs."""
    print("\nbf16, forward, microseconds a step: of 256 steps, and of each further one")
    for row in rows:
        if row["hidden"] == 1024 or row["batch"] in (1, 8, 16):
            step, further = row["us_a_step"], row["slope_us"]
            size = f"hidden {row['hidden']:<5} mini-batch {row['batch']:<3}"
            print(f"{row['cell']:5}{size} {step:5.2f} {further:5.2f}")


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def models(rows: list[dict[str, Any]]) -> None:
    print("\nwhole training steps under bf16 autocast, milliseconds: torch.nn -> tilefit.nn")
    for row in rows:
        if row["dtype"] == "bf16":
            times = f"{row['baseline_ms']:7.1f} -> {row['tilefit_ms']:5.1f}"
            ratio = row["baseline_ms"] / row["tilefit_ms"]
            print(f"{row['model']:17} {row['variant']:9} {row['baseline']:19} {times}  {ratio:5.1f}x")


def deepbench(rows: list[dict[str, Any]]) -> None:
    print("\nDeepBench's lists, torch.nn's time over tilefit.nn's, geometric mean:")
    for name in ("inference", "training"):
        of_list = [row for row in rows if row["list"] == name]
        for dtype in ("bf16", "fp16"):
            chosen = [row for row in of_list if row["dtype"] == dtype]
            values = [row["torch_us_per_step"] / row["tilefit_us_per_step"] for row in chosen]
            by_cudnn = sum(row["backend"] == "cudnn" for row in chosen)
            print(f"{name:9} {dtype}  {mean(values):4.2f}x of {len(values)}, {by_cudnn} by cuDNN")


def peers(rows: list[dict[str, Any]]) -> None:
    print("\nthe peer's time over tilefit's, bf16:")
    for name in dict.fromkeys(row["peer"] for row in rows):
        of_peer = [row for row in rows if row["peer"] == name]
        values = [
            row["peer_us"] / row["tilefit_captured_us" if row["peer_captured"] else "tilefit_us"]
            for row in of_peer
        ]
        print(f"{name:13} {mean(values):4.2f}x of {len(values)}, {min(values):4.2f}x at least")


def correctness(shapes: list[dict[str, Any]], launches: list[dict[str, Any]]) -> None:
    print(f"\nerror against float64 over cuDNN's, {len(shapes)} random shapes:")
    for dtype in ("bf16", "fp16", "fp32"):
        of_dtype = [row["ratios"] for row in shapes if row["dtype"] == dtype]
        values = [ratio for ratios in of_dtype for ratio in ratios.values()]
        over = sum(max(ratios.values()) > 1.5 for ratios in of_dtype)
        print(
            f"{dtype}  median {statistics.median(values):4.2f}, above 1.5 in {over} of {len(of_dtype)} shapes"
        )
    count, different = (sum(row[name] for row in launches) for name in ("launches", "different"))
    print(f"{different} of {count} repeated launches gave other bits")


def memory(rows: list[dict[str, Any]]) -> None:
    print("\nsaved for backward, KiB a step (hidden 1024, mini-batch 64):")
    print("        cuDNN tilefit  tilefit recomputing")
    for row in rows:
        saved = (row[f"{who}_bytes_per_step"] / 1024 for who in ("torch", "tilefit", "recompute"))
        slower = row["recompute_us_per_step"] / row["tilefit_us_per_step"]
        print(f"{row['cell']:5}" + "".join(f"{kib:8.0f}" for kib in saved) + f"   {slower:.2f}x the time")


def main() -> None:
    grid, rest = recorded("recurrent_grid"), recorded("recurrent")
    print(f"{grid['gpu']}, torch {grid['torch']}, cuDNN {grid['cudnn']}, {grid['date']}")
    steps_table(grid["grid"])
    absolute(rest["absolute"])
    ratios(grid["grid"])
    deepbench(rest["deepbench"])
    models(rest["models"])
    peers(recorded("recurrent_peers")["peers"]["rows"])
    memory(rest["memory"]["saved"])
    correctness(rest["correctness"]["shapes"], rest["correctness"]["launches"])


if __name__ == "__main__":
    main()
