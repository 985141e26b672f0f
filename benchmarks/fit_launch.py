"""Fit what the host spends to launch a step to recorded steps of whole_steps.py.

    PYTHONPATH=src python benchmarks/fit_launch.py

The steps in ``launch_steps.json`` are those of another run than ``whole_steps.json``, by which the fitted
model is judged.

For each part of an eager step the relative error is made small: with a fixed time, one for each operation,
and one for each change of the running module (forward pass) or each parameter (backward pass, optimizer).
Some constants are given, see GIVEN_US. It prints the constants of ``tilefit.cost.launch``, how well they fit,
and how far off they are of a model that the others were fitted without. Steps with recurrent layers are left
out: cuDNN launches their kernels by itself. Likewise for forward passes alone, whose host's speed the run's
reference steps tell. Then, of the compiled steps whose layers are compiled each for
itself, what one such layer takes: the part of the step that the rest of its host time does not explain. And,
timed here, how much less Python a fused AdamW runs for a parameter than a multi-tensor one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from whole_steps import host_scale

from tilefit.cost.launch import KERNEL_S, OPTIMIZER_S, RECOMPILED_S

RESULTS = Path(__file__).parent / "results"
PARTS = {
    "forward": ("fixed", "operations", "modules"),
    "backward": ("fixed", "operations", "parameters"),
    "optimizer": ("fixed", "parameters"),
}
#: Of a forward pass alone.
ALONE = ("operations", "modules")
#: What these rows cannot tell: only one has operations of many kernels, and all have the same optimizer.
GIVEN_US: dict[str, dict[str, float]] = {
    "forward": {"kernels": 1e6 * KERNEL_S},
    "backward": {"kernels": 1e6 * KERNEL_S},
    "optimizer": {"operations": 1e6 * OPTIMIZER_S},
}
#: Relative errors beyond this count linearly, not squared: other processes disturbed some rows.
DISTURBED = 0.05
_Array = NDArray[np.float64]


def solved(shares: _Array, rest: _Array) -> _Array:
    """The nonnegative constants."""
    start = np.full(shares.shape[1], 10.0)
    scale = 1 / np.abs(shares).max(0)
    found = least_squares(
        lambda constants: shares @ constants - rest,
        start,
        bounds=(0, np.inf),
        x_scale=scale,
        loss="soft_l1",
        f_scale=DISTURBED,
    )
    return np.asarray(found.x)


def fitted(
    rows: Sequence[dict[str, Any]], part: str, number: int, names: Sequence[str], scale: float = 1.0
) -> tuple[_Array, list[float], list[float]]:
    """The constants in microseconds on the model's host, where the rows' took ``scale`` times as long; the
    relative error of each row with them, and with those that were fitted without the row's model."""

    def counts(names: Sequence[str]) -> _Array:
        launches = [{"fixed": 1, **row["launches"][part]} for row in rows]
        return np.array([[each[name] for name in names] for each in launches], dtype=float)

    spent_us = np.array([1e3 * row["host_ms"][number] for row in rows]) / scale
    given_us = counts([*GIVEN_US[part]]) @ np.array([*GIVEN_US[part].values()])
    shares, rest = counts(names) / spent_us[:, None], 1 - given_us / spent_us
    constants = solved(shares, rest)
    models = [row["model"].split()[0].rstrip(",") for row in rows]
    without = []
    for index, model in enumerate(models):
        others = np.array([other != model for other in models])
        without.append(abs(shares[index] @ solved(shares[others], rest[others]) - rest[index]))
    return constants, [*np.abs(shares @ constants - rest)], without


def eager(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows without recurrent layers."""
    return [row for row in result["rows"] if "recurrent" not in row["kinds"]]


def show(part: str, names: Sequence[str], steps: int, found: tuple[_Array, list[float], list[float]]) -> None:
    constants, *errors = found
    stated = ", ".join(f"{name} {value:.1f}" for name, value in zip(names, constants, strict=True))
    fit, without = (f"median {statistics.median(off):.0%}, worst {max(off):.0%}" for off in errors)
    print(f"{part}: {stated} us; error {fit}; of a model left out {without}; {steps} steps")


def adamw_python_us(parameters: int, **kind: bool) -> float:
    """Time of a step of AdamW on this CPU whose operations on parameters do nothing, and of ``zero_grad``."""
    tensors = [torch.nn.Parameter(torch.zeros(4)) for _ in range(parameters)]
    optimizer = torch.optim.AdamW(tensors, **kind)
    # The steps are counted on the CPU, by an operation that stays.
    names = {name for name in dir(torch) if name.startswith("_foreach_")} - {"_foreach_add_"}
    nothing = dict.fromkeys((*names, "_fused_adamw_"), lambda first, *args, **kwargs: first)
    times = []
    with patch.multiple(torch, **nothing):
        for _ in range(60):
            for tensor in tensors:
                tensor.grad = torch.zeros(4)
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=Path, default=RESULTS / "launch_steps.json")
    parser.add_argument("--inference", type=Path, default=RESULTS / "whole_steps_inference.json")
    parser.add_argument("--compiled", type=Path, default=RESULTS / "whole_steps_compiled.json")
    options = parser.parse_args()
    rows = eager(json.loads(options.steps.read_text()))
    for number, (part, names) in enumerate(PARTS.items()):
        show(part, names, len(rows), fitted(rows, part, number, names))
    inference = json.loads(options.inference.read_text())
    rows = eager(inference)
    scale = host_scale([row for row in inference["rows"] if "reference_turns_ms" in row])
    show("forward alone", ALONE, len(rows), fitted(rows, "forward", 0, ALONE, scale))
    layers_ms = []
    for row in json.loads(options.compiled.read_text())["rows"]:
        if layers := row["recompiled"]:
            rest_ms = row["predicted_host_ms"] - 1e3 * RECOMPILED_S * layers
            layers_ms.append((row["sustained_ms"] - rest_ms) / layers)
            print(f"{row['model']}: {layers_ms[-1]:.2f} ms for each of {layers} layers")
    print(f"compiled for itself: {statistics.geometric_mean(layers_ms):.2f} ms a layer")
    each_us = [
        (adamw_python_us(250, **kind) - adamw_python_us(50, **kind)) / 200
        for kind in ({"foreach": True}, {"fused": True})
    ]
    print(
        f"Python of AdamW for a parameter, here: {each_us[0]:.1f} us, fused {each_us[1]:.1f} us "
        f"({each_us[1] / each_us[0]:.2f} times)"
    )


if __name__ == "__main__":
    main()
