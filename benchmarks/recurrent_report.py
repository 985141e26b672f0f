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
                f"{row['forward_cudnn_captured']:.1f} -> {row['forward_tilefit_captured']:.2f}"
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


def models(runs: list[list[dict[str, Any]]]) -> None:
    print("\nwhole training steps under autocast, milliseconds of the last run: torch.nn -> tilefit.nn")
    for rows in zip(*runs, strict=True):
        last = rows[-1]
        times = f"{last['baseline_ms']:7.1f} -> {last['tilefit_ms']:5.1f}"
        ratios = " ".join(f"{row['baseline_ms'] / row['tilefit_ms']:6.2f}x" for row in rows)
        what = f"{last['dtype']}  {last['model']:17} {last['variant']:9} {last['baseline']:19}"
        print(f"{what} {times}  {ratios}")


def deepbench(rows: list[dict[str, Any]]) -> None:
    print("\nDeepBench's lists, torch.nn's time over tilefit.nn's, geometric mean:")
    for name in ("inference", "training"):
        of_list = [row for row in rows if row["list"] == name]
        for dtype in ("bf16", "fp16"):
            chosen = [row for row in of_list if row["dtype"] == dtype]
            values = [row["torch_us_per_step"] / row["tilefit_us_per_step"] for row in chosen]
            by_cudnn = sum(row["backend"] == "cudnn" for row in chosen)
            slower = sum(value < 0.97 for value in values)
            ran = f"{by_cudnn} by cuDNN, slower in {slower}"
            print(f"{name:9} {dtype}  {mean(values):4.2f}x of {len(values)}, {ran}")


def single_steps(rows: list[dict[str, Any]]) -> None:
    """Forward passes in bf16 are left out: they ran by kernels that they no longer run by."""
    print("\nsingle steps, torch.nn's time over tilefit.nn's, geometric mean of LSTMs and GRUs:")
    for kind, name, dtypes in (
        ("forward", "forward", ("fp16", "fp32")),
        ("both", "forward and backward", ("bf16", "fp16", "fp32")),
    ):
        for dtype in dtypes:
            chosen = [row for row in rows if row["dtype"] == dtype]
            eager, captured = (
                [row[f"{kind}_cudnn{mode}"] / row[f"{kind}_tilefit{mode}"] for row in chosen]
                for mode in ("", "_captured")
            )
            least = f"{min(eager):4.2f}x and {min(captured):4.2f}x at least"
            print(
                f"{name:21} {dtype}  eager {mean(eager):4.2f}x, CUDA graphs {mean(captured):4.2f}x, {least}"
            )


def flat_weights(rows: list[dict[str, Any]]) -> None:
    print("\ncuDNN with bf16 weights that lie together, microseconds a call less than in torch.nn:")
    for kind, name in (("forward", "forward"), ("both", "forward and backward")):
        for steps in sorted({row["steps"] for row in rows}):
            chosen = [row for row in rows if row["steps"] == steps and row["dtype"] == "bf16"]
            eager, captured = (
                statistics.median(
                    steps * (row[f"{kind}_cudnn{mode}"] - row[f"{kind}_fallback{mode}"]) for row in chosen
                )
                for mode in ("", "_captured")
            )
            times = statistics.median(row[f"{kind}_cudnn"] / row[f"{kind}_fallback"] for row in chosen)
            figures = f"eager {eager:4.0f} ({times:.2f}x), CUDA graphs {captured:4.1f}"
            print(f"{name:21} {steps:3} steps  {figures}; median of {len(chosen)} sizes")


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
    for backend, name in (("persistent", "persistent kernels"), ("cell", "single steps")):
        for dtype in ("bf16", "fp16", "fp32"):
            of_dtype = [r["ratios"] for r in shapes if (r["backend"], r["dtype"]) == (backend, dtype)]
            values = [ratio for ratios in of_dtype for ratio in ratios.values()]
            over = sum(max(ratios.values()) > 1.5 for ratios in of_dtype)
            figures = f"median {statistics.median(values):4.2f}, at most {max(values):4.2f}"
            print(f"{name:18} {dtype}  {figures}, above 1.5 in {over} of {len(of_dtype)} shapes")
    count, different = (sum(row[name] for row in launches) for name in ("launches", "different"))
    print(f"{different} of {count} repeated launches gave other bits")


def memory(rows: list[dict[str, Any]], small: list[dict[str, Any]]) -> None:
    print("\nsaved for backward, KiB a step (hidden 1024, mini-batch 64):")
    print("        cuDNN tilefit  tilefit recomputing")
    for row in rows:
        saved = (row[f"{who}_bytes_per_step"] / 1024 for who in ("torch", "tilefit", "recompute"))
        slower = row["recompute_us_per_step"] / row["tilefit_us_per_step"]
        print(f"{row['cell']:5}" + "".join(f"{kib:8.0f}" for kib in saved) + f"   {slower:.2f}x the time")
    print("training throughput of mini-batch 4 over 4096 steps, which saves as much as 64 over 256 do:")
    for row in small:
        other, own = (row["tilefit_small"] / row[f"{who}_large"] for who in ("torch", "tilefit"))
        print(f"{row['cell']:5}{other:.2f} of cuDNN's with 64, {own:.2f} of tilefit's with 64")


def main() -> None:
    grid, rest = recorded("recurrent_grid"), recorded("recurrent")
    print(f"{grid['gpu']}, torch {grid['torch']}, cuDNN {grid['cudnn']}, {grid['date']}")
    steps_table(grid["grid"])
    absolute(rest["absolute"])
    ratios(grid["grid"])
    deepbench(rest["deepbench"])
    single_steps(rest["single_steps"])
    flat_weights(recorded("recurrent_short")["grid"])
    models([rest["models_earlier"], rest["models"]])
    peers(recorded("recurrent_peers")["peers"]["rows"])
    memory(rest["memory"]["saved"], rest["memory"]["small_batches"])
    correctness(rest["correctness"]["shapes"], rest["correctness"]["launches"])


if __name__ == "__main__":
    main()
