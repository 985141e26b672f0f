"""Fit what the host spends to launch an operation to the recorded steps of whole_steps.py.

    python benchmarks/fit_launch.py

Nonnegative least squares of the relative error, for each part of a step: a fixed time, a time for each
operation by kind, and one for each further kernel. It prints the constants of ``tilefit.cost.launch`` and how
well they fit. Steps with recurrent layers are left out: cuDNN launches their kernels by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

RESULT = Path(__file__).parent / "results" / "whole_steps.json"
PARTS = {
    "forward": ("fixed", "gemm", "conv", "attention", "streaming"),
    "backward": ("fixed", "gemm", "conv", "attention", "streaming", "kernels"),
    "optimizer": ("streaming", "kernels"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=Path, default=RESULT)
    rows = json.loads(parser.parse_args().steps.read_text())["rows"]
    rows = [row for row in rows if "recurrent" not in row["launches"]["forward"]]
    for number, (part, names) in enumerate(PARTS.items()):
        counts = np.array(
            [
                [1 if name == "fixed" else row["launches"][part].get(name, 0) for name in names]
                for row in rows
            ],
            dtype=float,
        )
        spent_us = np.array([1e3 * row["host_ms"][number] for row in rows])
        constants, _ = nnls(counts / spent_us[:, None], np.ones(len(rows)))
        off = [abs(error) for error in counts @ constants / spent_us - 1]
        stated = ", ".join(f"{name} {value:.1f}" for name, value in zip(names, constants, strict=True))
        print(f"{part}: {stated} us; median error {statistics.median(off):.0%}, worst {max(off):.0%}")


if __name__ == "__main__":
    main()
