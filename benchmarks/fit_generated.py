"""Fit what kernels that Inductor wrote compute beside moving their bytes.

    PYTHONPATH=src python benchmarks/fit_generated.py

Data: kernels of the compiled steps in ``whole_steps_compiled.json`` (times on an H200) that are found by
name and number in ``inductor_kernels.json`` (bytes and elements); models of static sizes alone. Nonnegative
least squares of the relative error, on top of what the cost model says of the traffic: a time for each
element, by function. It prints the constants of ``tilefit.cost.fusion``, as FLOP at the fp32 peak, and how
well they fit, each model also left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from tilefit import gpus
from tilefit.cost.model import estimate
from tilefit.ops import Streaming

RESULTS = Path(__file__).parent / "results"
#: By pass: a function's name in those of the kernels.
FUNCTIONS = {
    "forward": ("native_dropout", "gelu", "tanh", "silu", "native_layer_norm", "safe_softmax", "log_softmax"),
    "backward": (
        "native_dropout_backward",
        "gelu_backward",
        "tanh_backward",
        "silu",
        "native_layer_norm_backward",
        "log_softmax_backward_data",
    ),
}
NAMES = list(dict.fromkeys(name for names in FUNCTIONS.values() for name in names))
#: Statistics of a batch norm: a kernel of its own.
STATISTICS = "native_batch_norm"


#: More graphs than these are parts of a model, of which some have dynamic sizes.
MOST_GRAPHS = 4


@dataclass
class Kernel:
    model: str
    time_us: float
    traffic_us: float
    work: Counter[str]


def kernels(steps: dict[str, Any], scheduled: dict[str, Any]) -> Iterator[Kernel]:
    """The kernels found in both."""
    rows = {row["model"]: row["generated"] for row in scheduled["rows"] if row["graphs"] <= MOST_GRAPHS}
    for step in steps["rows"]:
        # Of kernels of the same name and number, the longest moves the most.
        left = sorted(rows.get(step["model"], ()), key=lambda row: -row[2] - row[3])
        for time_ms, count, name in step.get("kernel_list") or step["top_kernels"]:
            whole = re.fullmatch(r"triton_(poi|per|red)_(fused.*?)(_\d+)?", name)
            if whole is None:
                continue
            kind, base, number = whole.groups()
            same = [
                row
                for row in left
                if row[5] == count and (row[1] == base if number else row[1].startswith(base))
            ]
            if not same:
                continue
            left.remove(same[0])
            phase, full, read_bytes, write_bytes, elements, _ = same[0]
            work = Counter({f: elements for f in FUNCTIONS[phase] if re.search(rf"{f}(?!_backward)", full)})
            if kind == "red" and phase == "forward" and "native_batch_norm" in full:
                work[STATISTICS] = read_bytes // 2
            traffic = estimate(Streaming("pointwise", elements, read_bytes, write_bytes, "bf16"), "h200")
            yield Kernel(step["model"], 1e3 * time_ms / count, 1e6 * traffic.time_s, work)


def fitted(data: list[Kernel], names: list[str]) -> np.ndarray:
    table = np.array([[each.work[name] / each.time_us for name in names] for each in data])
    constants, _ = nnls(table, np.array([1 - each.traffic_us / each.time_us for each in data]))
    return constants


def errors(data: list[Kernel], names: list[str], constants: np.ndarray) -> list[float]:
    return [
        (each.traffic_us + float(constants @ [each.work[name] for name in names])) / each.time_us - 1
        for each in data
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=Path, default=RESULTS / "whole_steps_compiled.json")
    parser.add_argument("--scheduled", type=Path, default=RESULTS / "inductor_kernels.json")
    options = parser.parse_args()
    data = list(kernels(json.loads(options.steps.read_text()), json.loads(options.scheduled.read_text())))
    names = [name for name in (*NAMES, STATISTICS) if any(each.work[name] for each in data)]
    constants = fitted(data, names)
    peak = gpus.get("h200").peak_flop_per_s("fp32")
    for name, constant in zip(names, constants, strict=True):
        count = sum(each.work[name] > 0 for each in data)
        print(f"{name:28} {1e-6 * constant * peak:5.0f} FLOP per element ({count} kernels)")
    off = errors(data, names, constants)
    left_out = []
    for model in {each.model for each in data}:
        others = fitted([each for each in data if each.model != model], names)
        left_out += errors([each for each in data if each.model == model], names, others)
    alone = errors(data, names, np.zeros(len(names)))
    for what, values in (("fitted", off), ("model left out", left_out), ("traffic alone", alone)):
        print(f"{what}: median error {statistics.median(map(abs, values)):.0%} of {len(values)} kernels")


if __name__ == "__main__":
    main()
