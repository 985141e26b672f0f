"""What compiled code takes of the host, from recorded steps that the host limits.

    PYTHONPATH=src python benchmarks/fit_compiled.py

Two sources, neither of which says all. The models of equal parts (``compiled_calls.py``, ``results/
compiled_calls_h100.json``) tell parts apart: the difference of two models over what one has more of. Steps
of real models (``results/compiled_steps_*.json``) tell what a kernel and a call of a library take among many
different ones; what a graph and a parameter take is given from the others, as they are in
``tilefit.cost.launch``. Times are over the host's own, which its reference step tells.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from whole_steps import captured, host_scale, runs

from tilefit.cost.fusion import fuse
from tilefit.cost.launch import (
    COMPILED_CALL_S,
    COMPILED_KERNEL_S,
    FIXED_S,
    GRAPH_PARAMETER_S,
    GRAPH_S,
    OPTIMIZER_S,
    REFERENCE_STEP_S,
    UPDATE_S,
)
from tilefit.cost.streaming import GENERATED
from tilefit.ops import OPTIMIZER, Step, Streaming

RESULTS = Path(__file__).parent / "results"
STEPS = ("compiled_steps_h200.json", "compiled_steps_h100.json", "compiled_calls_h100.json")
#: Times as long as the GPU's kernels from which a step is the host's.
LIMITED = 1.15
#: What differs, by its name: more of it, less of it, how many more, and of which part of the step (forward,
#: backward, optimizer).
PAIRS = {
    "a kernel, forward": ("many_kernels", "plain_kernels", 128, 0),
    "a kernel, backward": ("many_kernels", "plain_kernels", 128, 1),
    "a product, forward": ("shared_products", "modules", 127, 0),
    "a product, backward": ("shared_products", "modules", 254, 1),
    "a parameter, forward": ("many_parameters", "parameters", 192, 0),
    "a parameter, backward": ("many_parameters", "parameters", 192, 1),
    "a parameter, optimizer": ("many_parameters", "parameters", 192, 2),
    "an input, forward": ("inputs", "modules", 63, 0),
    "a module, forward": ("many_modules", "modules", 448, 0),
    "attention, forward": ("attentions", "modules", 32, 0),
    "attention, backward": ("attentions", "modules", 32, 1),
    "a depthwise convolution, forward": ("depthwise", "modules", 63, 0),
    "its two gradients": ("depthwise", "modules", 63, 1),
}


def rows(name: str) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / name).read_text())["rows"]
    return [row for row in found if "gpu_ms" in row]


def equal_parts() -> None:
    by_name = {row["model"].partition(":")[2]: row for row in rows(STEPS[-1])}

    def spent_us(name: str, part: int) -> float:
        row = by_name[name]
        beside = zip(row["reference_turns_ms"], row["after_turns_ms"], strict=True)
        scales = [statistics.mean(each) / (1e3 * REFERENCE_STEP_S) for each in beside]
        return 1e3 * min(turn[part] / s for turn, s in zip(row["host_turns_ms"], scales, strict=True))

    for what, (more, less, count, part) in PAIRS.items():
        print(f"{what:34} {(spent_us(more, part) - spent_us(less, part)) / count:6.1f} us")
    alone = [round(spent_us("many_modules", part)) for part in range(3)]
    print(f"a step of one layer: forward, backward, optimizer: {alone} us")
    for name in ("parameters", "many_parameters"):
        print(f"optimizers, {name}: {by_name[name].get('optimizers_ms')} ms on that host")


def counted(step: Step) -> tuple[int, int, int]:
    """Kernels of the compiler, calls of libraries, parameters with a gradient."""
    passes = [entry.op for entry in step.ops if entry.phase != OPTIMIZER]
    kernels = [op.kernels for op in passes if isinstance(op, Streaming) and op.function == GENERATED]
    trained = sum(parameter.trainable for parameter in step.parameters.values())
    return sum(kernels), len(passes) - len(kernels), trained


def real_steps() -> None:
    known = {run.label: run for run in runs(False, True)}
    counts, spent_us, which = [], [], []
    for name in STEPS:
        for row in rows(name):
            limited = row["sustained_ms"] > LIMITED * row["gpu_ms"] and row.get("unique_graphs") == 1
            if not limited or row["graph_breaks"] or "compiled_calls" in row["model"]:
                continue
            step = fuse(captured(known[row["model"]]))
            if step.settings.compiled and not any(entry.eager for entry in step.ops):
                counts.append(counted(step))
                spent_us.append(1e3 * row["sustained_ms"] / host_scale([row]))
                which.append(f"{name} {row['model']}")
    made = np.array(counts, dtype=float)
    spent = np.array(spent_us)
    parameter_us = 1e6 * (GRAPH_PARAMETER_S + UPDATE_S)
    given = 1e6 * (2 * GRAPH_S + FIXED_S["optimizer"] + 8 * OPTIMIZER_S) + parameter_us * made[:, 2]
    fitted = least_squares(
        lambda each: (made[:, :2] @ each + given) / spent - 1, [10.0, 10.0], loss="soft_l1", f_scale=0.1
    ).x
    stated = 1e6 * np.array([COMPILED_KERNEL_S, COMPILED_CALL_S])
    for name, each in (("fitted", fitted), ("stated", stated)):
        off = (made[:, :2] @ each + given) / spent - 1
        print(
            f"{name}: a kernel {each[0]:.1f} us, a call {each[1]:.1f} us; off by {np.median(abs(off)):.1%} "
            f"in the median, {max(abs(off)):.0%} at worst, of {len(off)} steps"
        )
    for label, error in sorted(zip(which, off, strict=True), key=lambda item: item[1]):
        print(f"  {label:66} {error:+.0%}")


if __name__ == "__main__":
    equal_parts()
    real_steps()
