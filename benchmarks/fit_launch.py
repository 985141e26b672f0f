"""Fit what the host spends to launch an operation to the recorded steps of whole_steps.py.

    python benchmarks/fit_launch.py

Nonnegative least squares of the relative error, for each part of a step: a fixed time, a time for each
operation by kind, and one for each further kernel. The time of an attention is given: fitted freely it takes
over what the modules around it cost, which attention written by hand has as well. It prints the constants of
``tilefit.cost.launch`` and how well they fit. Steps with recurrent layers are left out: cuDNN launches their
kernels by itself.
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
    "forward": ("fixed", "gemm", "conv", "streaming"),
    "backward": ("fixed", "gemm", "conv", "streaming", "kernels"),
    "optimizer": ("streaming", "kernels"),
}
#: Microseconds of an attention: about three times those of a call alone, as other operations take in a model.
ATTENTION_US = {"forward": 60.0, "backward": 100.0, "optimizer": 0.0}


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
        given_us = np.array([ATTENTION_US[part] * row["launches"][part].get("attention", 0) for row in rows])
        constants, _ = nnls(counts / spent_us[:, None], 1 - given_us / spent_us)
        off = [abs(error) for error in (counts @ constants + given_us) / spent_us - 1]
        stated = ", ".join(f"{name} {value:.1f}" for name, value in zip(names, constants, strict=True))
        print(f"{part}: {stated} us; median error {statistics.median(off):.0%}, worst {max(off):.0%}")


if __name__ == "__main__":
    main()
