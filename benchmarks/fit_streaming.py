"""Fit what limits PyTorch's streaming kernels to the profile of a GPU, function by function.

    PYTHONPATH=src python benchmarks/fit_streaming.py STEPS... [--held-out STEPS...] [--write]

STEPS are folders of captured steps (``timm_tables.py --steps``). For each function the four constants of
:class:`tilefit.cost.streaming.Limits` are searched that come closest to what the shipped calibration of the
H200 says of the operations in these steps; printed are the predicted over the calibration's times, of the
functions' operations in the held-out steps. ``--write`` writes the constants.
"""

from __future__ import annotations

import argparse
import pickle
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np

from tilefit.cost.model import estimate_all
from tilefit.cost.priced import PricedGpu, priced
from tilefit.cost.streaming import FUNCTIONS, LIMITS, Limits, busy_s
from tilefit.ops import Streaming

SHARES = (
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.13,
    0.16,
    0.2,
    0.25,
    0.3,
    0.35,
    0.4,
    0.45,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1.0,
)
BYTES_PER_CLOCK = (1.0, 1.6, 2.3, 3.3, 4.5, 6.5, 9.0, 13.0, 20.0, 0.0)
CLOCKS_PER_ROW = (0.0, 0.5, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 360.0)
KERNELS = (0.25, 0.4, 0.7, 1.0, 1.5, 2.5, 4.0)
#: Operations of a function at least; and the time below which they tell only what starting a kernel takes.
LEAST, LATENCY_S = 4, 5e-6
#: Operations of a function that it is fitted to.
MOST = 150

Key = tuple[str, bool]


def operations(folders: Iterable[Path], gpu: PricedGpu) -> dict[Key, list[tuple[Streaming, float]]]:
    """The eager steps' operations that the calibration covers, by function, with its times."""
    found = set()
    for path in sorted(path for folder in folders for path in folder.glob("*-False.pickle")):
        found |= {entry.op for entry in pickle.loads(path.read_bytes()).ops}  # which a benchmark wrote
    ops = [op for op in found if isinstance(op, Streaming) and op.function in FUNCTIONS]
    by_function: dict[Key, list[tuple[Streaming, float]]] = defaultdict(list)
    for op, estimate in zip(ops, estimate_all(ops, gpu), strict=True):
        by_function[op.function, op.strided].append((op, estimate.time_s))
    return by_function


def fitted(rows: list[tuple[Streaming, float]], gpu: PricedGpu) -> Limits:
    """The constants with the least mean and largest error, in logarithms."""
    rows = sorted(rows, key=lambda row: row[1])[:: 1 + len(rows) // MOST]  # evenly over the times
    shares = SHARES if max(time_s for _, time_s in rows) > LATENCY_S else SHARES[-1:]
    times = np.log([time_s for _, time_s in rows])
    kernels = np.array([op.kernels for op, _ in rows]) * gpu.constants.kernel_s(gpu)
    terms = {
        "share": {x: [busy_s(op, gpu, gpu.constants, Limits(x)) for op, _ in rows] for x in shares},
        "unit": {
            x: [busy_s(op, gpu, gpu.constants, Limits(1e9, x)) for op, _ in rows] for x in BYTES_PER_CLOCK
        },
        "row": {
            x: [busy_s(op, gpu, gpu.constants, Limits(1e9, 0.0, x)) for op, _ in rows] for x in CLOCKS_PER_ROW
        },
    }
    arrays = {name: {x: np.array(found) for x, found in each.items()} for name, each in terms.items()}
    best, chosen = np.inf, Limits(1.0)
    for share, unit, row in product(*(arrays[name] for name in ("share", "unit", "row"))):
        busy = np.maximum(np.maximum(arrays["share"][share], arrays["unit"][unit]), arrays["row"][row])
        for kernel in KERNELS:
            signed = np.log(busy + kernel * kernels) - times
            error = np.abs(signed)
            loss = error.mean() + abs(np.median(signed)) + 0.2 * error.max() + 0.01 * ((unit > 0) + (row > 0))
            if loss < best:
                best, chosen = loss, Limits(share, unit, row, kernel)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    gpu = priced("h200")
    ours, others = operations(args.steps, gpu), operations(args.held_out, gpu)
    lines = []
    for (function, strided), rows in sorted(ours.items()):
        if len(rows) < LEAST:
            continue
        found = fitted(rows, gpu)
        lines.append(f"{function},{int(strided)}," + ",".join(f"{each:g}" for each in found))
        for name, tried in (("fitted", rows), ("held out", others.get((function, strided), []))):
            if not tried:
                continue
            ratios = [
                (
                    busy_s(op, gpu, gpu.constants, found)
                    + found.kernels * op.kernels * gpu.constants.kernel_s(gpu)
                )
                / time_s
                for op, time_s in tried
            ]
            print(
                f"{function + ' strided' * strided:44} {name:8} {len(ratios):5}:"
                f" median {np.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
            )
    if args.write:
        LIMITS.write_text(
            "function,strided,share,bytes_per_clock,clocks_per_row,kernels\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
