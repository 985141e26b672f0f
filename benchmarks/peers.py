"""Errors of other ways to predict a product's time, beside tilefit's, on the same held-out H200 products.

    PYTHONPATH=src python benchmarks/peers.py --data results/h200

The rows are a random sample of the bf16 products in the test set of fit_calibration.py. Compared:

- roofline, datasheet: ``max(flop / peak, bytes / bandwidth)``.
- roofline, measured: the same with the best rates of the training set's products (99.9th percentiles).
- nvMatmulHeuristics: the runtime model, for the H200 preset, of NVIDIA's package that chooses kernels. It has
  no target for cuBLAS; scored are the two targets that choose Hopper's instructions as cuBLAS does, by the
  first configuration proposed and by the fastest of 16. The package is no dependency: without
  ``pip install nvidia-matmul-heuristics`` its rows are absent.
- tilefit: the analytic stage alone, and as it ships.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fit_calibration import GPU, Measured, errors, read

from tilefit.cost import calibration, priced
from tilefit.cost.kernels import select
from tilefit.cost.model import analytic
from tilefit.ops import Gemm
from tilefit.ops.dtypes import ALIGNMENT_BYTES

RESULT = Path(__file__).parent / "results" / "peers_h200.json"
PACKAGE = "nvidia-matmul-heuristics"
#: Its name of bf16 operands, fp32 accumulation, bf16 result.
PRECISION = "TST"
PROPOSALS = 16

Predict = Callable[[Gemm], float]


def roofline(flop_per_s: float, bytes_per_s: float) -> Predict:
    return lambda op: max(op.flop / flop_per_s, op.moved_bytes / bytes_per_s)


def corrected(fitted: calibration.Calibration) -> Predict:
    return lambda op: fitted.correct([op], GPU, [analytic(op, GPU)])[0].time_s


def measured_ceilings(trained: list[Measured]) -> tuple[float, float]:
    """The FLOP/s and bytes/s that the best products reach."""
    return (
        float(np.quantile([each.op.flop / each.time_s for each in trained], 0.999)),
        float(np.quantile([each.op.moved_bytes / each.time_s for each in trained], 0.999)),
    )


def nv_heuristics() -> tuple[dict[str, Predict], list[str]]:
    """Predictions by target and by which of its proposals is timed, and what could not be had."""
    if importlib.util.find_spec("nvMatmulHeuristics") is None:
        return {}, [f"{PACKAGE} is not installed: pip install {PACKAGE}"]
    import nvMatmulHeuristics as nv  # noqa: N813

    layouts = nv.NvMatmulHeuristicsMatmulLayout
    predictions: dict[str, Predict] = {}
    for target in ("GENERIC", "CUTLASS3"):
        model = nv.NvMatmulHeuristicsInterfaceEx(
            backend=nv.NvMatmulHeuristicsTarget[target], gpu=nv.NvMatmulHeuristicsNvidiaGpu.H200_SXM
        )

        def proposals(op: Gemm, model: Any = model) -> list[float]:
            # cuBLAS's letters are column-major, where the product is C^T[n, m] = B^T A^T.
            layout = layouts[f"{op.layout}_COL_MAJOR"]
            problem = model.makeNvMatmulHeuristicsProblem(op.n, op.m, op.k, layout, op.batch)
            return [found["runtime"] for found in model.get(problem, PROPOSALS, PRECISION)]

        known: dict[Gemm, list[float]] = {}

        def cached(op: Gemm, known: dict[Gemm, list[float]] = known, ask: Any = proposals) -> list[float]:
            if op not in known:
                known[op] = ask(op) or [float("nan")]
            return known[op]

        predictions[f"nvMatmulHeuristics {target}, first"] = lambda op, ask=cached: ask(op)[0]
        predictions[f"nvMatmulHeuristics {target}, fastest of {PROPOSALS}"] = lambda op, ask=cached: min(
            ask(op)
        )
    return predictions, []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of collect_h200.py's files")
    parser.add_argument("--calibration", type=Path, help="instead of the one that ships")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--rows", type=int, default=2000, help="products compared")
    args = parser.parse_args()
    everything = [
        each
        for each in read(args.data, "gemm")
        if isinstance(each.op, Gemm) and each.op.dtype == "bf16" and not (each.op.ld_a or each.op.ld_b)
    ]
    trained = [each for each in everything if not each.held_out]
    held_out = [each for each in everything if each.held_out]
    tested = Random(0).sample(held_out, min(args.rows, len(held_out)))
    peak, bandwidth = measured_ceilings(trained)
    fitted = calibration.read(args.calibration) if args.calibration else priced.left_out(GPU).calibration
    others, notes = nv_heuristics()
    predictors: dict[str, Predict] = {
        "roofline, datasheet": roofline(GPU.peak_flop_per_s("bf16"), GPU.memory_bandwidth_bytes_per_s),
        "roofline, measured": roofline(peak, bandwidth),
        **others,
        "tilefit, analytic": lambda op: analytic(op, GPU).time_s,
        "tilefit, calibrated": corrected(fitted),
    }
    truth = np.array([each.time_s for each in tested])
    aligned = np.array([select(each.op, GPU).alignment_bytes >= ALIGNMENT_BYTES for each in tested])  # type: ignore[arg-type]
    large = np.array([each.op.flop >= 8.6e9 for each in tested])
    groups = {
        "all": np.ones_like(aligned),
        "aligned": aligned,
        "misaligned": ~aligned,
        "at least 8.6 GFLOP": large,
    }
    scores: dict[str, Any] = {}
    for name, predict in predictors.items():
        times = np.array([predict(each.op) for each in tested])  # type: ignore[arg-type]
        usable = np.array([isfinite(t) and t > 0 for t in times])
        if not usable.all():
            notes.append(f"{name}: no runtime for {int((~usable).sum())} of {len(times)} products, left out")
        scores[name] = {
            group: errors(times[chosen & usable], truth[chosen & usable])
            for group, chosen in groups.items()
            if (chosen & usable).any()
        }
        shown = [f"{g} {s['mape']:7.1f} / {s['median']:6.1f}" for g, s in scores[name].items()]
        print(f"{name:42s}", " | ".join(shown), flush=True)
    print(*notes, sep="\n", file=sys.stderr)
    result = {
        "gpu": GPU.name,
        "metric": "absolute percentage error of the time: mean (mape), median, 90th percentile",
        "dtype": "bf16",
        "held_out_rows": len(held_out),
        "tested_rows": len(tested),
        "measured_ceilings": {"flop_per_s": round(peak), "bytes_per_s": round(bandwidth)},
        "calibration": {key: fitted.about[key] for key in ("collected", "versions")},
        PACKAGE: version(PACKAGE) if others else None,
        "notes": notes,
        "errors": scores,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
