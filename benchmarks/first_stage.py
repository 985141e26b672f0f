"""Write the operations by which CI holds the cost model's first stage against the shipped profile of an H200.

    PYTHONPATH=src python benchmarks/first_stage.py STEPS... --out tests/data/first_stage.jsonl

STEPS are folders of captured steps (``timm_tables.py --steps``). Of each function, and each pass and kind of
convolution, a few operations are taken, evenly in the order of the time
that the profile says, which is written beside. Prints the first
stage's times over these, of all operations in the steps.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
from collections import defaultdict
from pathlib import Path

from tilefit.cost.analytic import analytic
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import priced
from tilefit.cost.streaming import FUNCTIONS
from tilefit.ops import Conv, Op, Streaming

EACH = 6


def function(op: Op) -> str:
    """What an operation is counted under."""
    match op:
        case Streaming():
            return op.function
        case Conv():
            groups = "dense" if op.groups == 1 else "narrow" if op.is_narrow else "grouped"
            return f"{groups} convolution {op.direction}"
    return " ".join((op.kind, op.dtype, getattr(op, "direction", ""))).strip()


def is_measured(op: Op) -> bool:
    """Whether the profile was fitted to operations of this function."""
    return not isinstance(op, Streaming) or op.function in FUNCTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpu = priced("h200")
    found: set[Op] = set()
    for path in sorted(path for folder in args.steps for path in folder.glob("*-False.pickle")):
        found |= {entry.op for entry in pickle.loads(path.read_bytes()).ops}  # which a benchmark wrote
    ops = sorted((op for op in found if gpu.covers(op) and is_measured(op)), key=repr)
    by_function: dict[str, list[tuple[Op, float]]] = defaultdict(list)
    for op, estimate in zip(ops, estimate_all(ops, gpu), strict=True):
        by_function[function(op)].append((op, estimate.time_s))
    lines = []
    for name, rows in sorted(by_function.items()):
        if len(rows) < EACH:
            continue
        ratios = sorted(analytic(op, gpu).time_s / time_s for op, time_s in rows)
        beyond = sum(not 1 / 3 < each < 3 for each in ratios) / len(ratios)
        print(
            f"{name:44} {len(rows):5}: median {statistics.median(ratios):.2f},"
            f" {ratios[0]:.2f} to {ratios[-1]:.2f}, beyond 3 {beyond:.1%}"
        )
        rows.sort(key=lambda row: row[1])
        for op, time_s in (rows[round((i + 0.5) / EACH * (len(rows) - 1))] for i in range(EACH)):
            lines.append(json.dumps([name, op.kind, op.values, float(f"{1e6 * time_s:.4g}")]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
