"""What compiled code takes of the host, from recorded steps that the host limits; and how it varies.

    PYTHONPATH=src python benchmarks/fit_compiled.py

Three kinds of steps set it, over what this model counts of each: those that were measured in turn with the
reference step before any of ``held_models.py`` (``compiled_steps.py --alternate-s``,
``results/compiled_turns_*.json``), older ones of an H200 with a reference before and after, and tiny ones
(``compiled_host.py``), of which those of many equal calls count less, since such calls take less than a real
model's. What an optimizer takes is given from elsewhere (``tilefit.cost.launch``). Each model is left out in
turn; printed are the errors of these, and of what is stated. Captures 80 models, which takes a few minutes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compiled_host
import numpy as np
from whole_steps import captured, runs

from tilefit.capture import capture
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.cost.launch import (
    COMPILED_CALL_S,
    COMPILED_KERNEL_S,
    CUDNN_S,
    GRAPH_PARAMETER_S,
    GRAPH_S,
    READ_S,
    REFERENCE_STEP_S,
    SAVED_S,
)
from tilefit.cost.streaming import GENERATED
from tilefit.ops import FORWARD, OPTIMIZER, Step, Streaming

RESULTS = Path(__file__).parent / "results"
#: Rows and how much each counts.
TURNS = {
    "compiled_turns_h100.json": 2.0,
    "compiled_turns_second_h100.json": 2.0,
    "compiled_steps_h200.json": 0.7,
}
TINY, TINY_WEIGHT, EQUAL_WEIGHT = "compiled_host_h200.json", 1.5, 0.3
#: Of two turns of each step, with a reference before each.
TWO_TURNS = ("compiled_newer_h100.json", "compiled_later_h100.json", "compiled_calls_h100.json")
#: Those of many equal calls.
EQUAL = (
    "kernels_64 kernels_read_nothing_64 kernels_repeated_64 products_64 parameters_64 convolutions_16 "
    "attention_8"
).split()
#: Times as long as the GPU's kernels from which a step is the host's, and turns that are few.
LIMITED, FEW = 1.25, 4
#: What is fitted, in seconds as it is stated.
PARTS = {
    "both graphs": 2 * GRAPH_S,
    "with convolutions": 2 * CUDNN_S,
    "a kernel": COMPILED_KERNEL_S,
    "gemm": COMPILED_CALL_S["gemm"],
    "conv": COMPILED_CALL_S["conv"],
    "attention": COMPILED_CALL_S["attention"],
    "a tensor saved": SAVED_S,
    "a tensor read": READ_S,
    "a parameter": GRAPH_PARAMETER_S,
}
#: How much that counts against one row, squared, and errors from which a row counts for less.
PRIOR, ROBUST = 0.001, 0.1


def spent_s(rows: list[dict[str, Any]]) -> float:
    """A step on the stated host: of each process the median over the reference beside it, or the fastest
    where there were few turns; and their mean."""
    each = []
    for row in rows:
        references = row["reference_turns_ms"]
        if len(references) <= FEW:
            each.append(row["sustained_ms"] / min(references))
            continue
        beside = zip(row["sustained_turns_ms"], references, row["after_turns_ms"], strict=True)
        each.append(statistics.median(2 * step / (before + after) for step, before, after in beside))
    return REFERENCE_STEP_S * statistics.mean(each)


def varied() -> None:
    """Print what differs between two turns of one process a second apart, and of two processes whose steps
    were measured in turn with the reference."""
    pairs = []
    for name in TWO_TURNS:
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            if len(row.get("host_turns_ms", ())) == 2:
                references = row["reference_turns_ms"]
                first, second = ([*row["host_turns_ms"][i], references[i]] for i in (0, 1))
                pairs.append(np.log(np.array(second) / first))
    off = np.array(pairs)
    same = np.corrcoef(off.T)
    forward, backward, optimizer, reference = off.std(axis=0)
    print(f"{len(off)} pairs of turns: forward {forward:.0%}, backward {backward:.0%}, the optimizer")
    print(f"{optimizer:.0%}, the reference before {reference:.0%}; the forward pass correlates with the")
    print(f"optimizer {same[0, 2]:.2f}, the backward pass {same[0, 1]:.2f}, the reference {same[0, 3]:.2f}")
    twice = [rows for name in TURNS for rows in limited(name).values() if len(rows) > 1]
    spread = [abs(spent_s(rows[:1]) / spent_s(rows[1:]) - 1) for rows in twice]
    print(
        f"{len(spread)} steps in two processes, over the reference in turn with them, differ by "
        f"{statistics.median(spread):.0%} in the median, {max(spread):.0%} at most"
    )


def limited(name: str) -> dict[str, list[dict[str, Any]]]:
    """By model, the rows of a result whose steps the host limits, but for those of many equal calls."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads((RESULTS / name).read_text())["rows"]:
        if "reference_turns_ms" in row and "compiled_calls" not in row["model"]:
            by_model.setdefault(row["model"], []).append(row)
    return {
        model: rows
        for model, rows in by_model.items()
        if min(row["sustained_ms"] for row in rows) >= LIMITED * max(row.get("gpu_ms", 0.0) for row in rows)
    }


def tiny() -> Iterator[tuple[str, float, Step]]:
    """Names of tiny steps, what they took on the stated host, and the steps."""
    for row in json.loads((RESULTS / TINY).read_text())["rows"]:
        if "whole_us" not in row:
            continue
        name = row["model"]
        took_s, reference_s = (
            statistics.median(each) * unit
            for each, unit in ((row["whole_us"]["hot"], 1e-6), (row["reference_turns_ms"], 1e-3))
        )
        model, inputs = compiled_host.MODELS[name]()
        on_shapes = tuple(each.to("meta") for each in inputs)
        amp = "" if name.endswith("fp32") else "bf16"
        step = capture(model.to("meta"), on_shapes, train=True, amp=amp, compile=True)
        yield name, REFERENCE_STEP_S * took_s / reference_s, fuse(step)


def counted(step: Step) -> list[int]:
    """As many as there are of :data:`PARTS`."""
    counts = dict.fromkeys(PARTS, 0)
    counts["both graphs"] = 1
    counts["a parameter"] = sum(each.trainable for each in step.parameters.values())
    before: set[int] = set()
    given, made = set[int](), set[int]()
    for entry in step.ops:
        if entry.phase == OPTIMIZER or entry.eager:
            continue
        if isinstance(entry.op, Streaming) and entry.op.function == GENERATED:
            counts["a kernel"] += entry.op.kernels
        elif entry.op.kind in counts:
            counts[entry.op.kind] += 1
        numbers = {ref.id for ref in entry.outputs}
        if entry.phase == FORWARD:
            before |= numbers
        else:
            given |= {ref.id for ref in entry.inputs} - made
            made |= numbers
    counts["with convolutions"] = int(counts["conv"] > 0)
    counts["a tensor saved"], counts["a tensor read"] = len(given & before), len(given - before)
    return list(counts.values())


def fitted(counts: np.ndarray, spent: np.ndarray, given: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Seconds of each part, none negative, by errors over what a step takes; near what is stated where few
    rows settle it."""
    likely = np.array([*PARTS.values()])
    found, shares = likely.copy(), counts / spent[:, None]
    wanted = 1 - given / spent
    for _ in range(40):
        weights = weight**0.5 * (1 + ((shares @ found - wanted) / ROBUST) ** 2) ** -0.25
        left = np.vstack([shares * weights[:, None], PRIOR**0.5 * np.diag(1 / likely)])
        right = np.concatenate([weights * wanted, np.full(len(likely), PRIOR**0.5)])
        square, product = left.T @ left, left.T @ right
        for _ in range(300):  # one after another, which keeps them from being negative
            for i in range(len(found)):
                rest = product[i] - square[i] @ found + square[i, i] * found[i]
                found[i] = max(0.0, rest / square[i, i])
    return found


def steps() -> Iterator[tuple[str, float, Step, float]]:
    """Names, what was taken on the stated host, steps, and what each counts."""
    known = {run.label: run for run in runs(False, True)}
    for name, weight in TURNS.items():
        for model, rows in limited(name).items():
            yield model, spent_s(rows), fuse(captured(known[model])), weight
    for model, took_s, step in tiny():
        yield model, took_s, step, EQUAL_WEIGHT if model in EQUAL else TINY_WEIGHT


def main() -> None:
    varied()
    stated = np.array([*PARTS.values()])
    names, counts, spent, given, weights = [], [], [], [], []
    for name, took_s, step, weight in steps():
        names.append(name)
        counts.append(counted(step))
        spent.append(took_s)
        weights.append(weight)
        given.append(estimate_step(step, "h200", launch_scale=1.0).host_time_s - np.dot(counts[-1], stated))
    made, took, beside, weight = np.array(counts, float), np.array(spent), np.array(given), np.array(weights)
    for part, each, says in zip(PARTS, fitted(made, took, beside, weight), stated, strict=True):
        print(f"{part:18} {1e6 * each:7.1f} us, stated {1e6 * says:7.1f}")
    others = [np.arange(len(names)) != i for i in range(len(names))]
    left_out = [
        made[i] @ fitted(made[keep], took[keep], beside[keep], weight[keep]) + beside[i]
        for i, keep in enumerate(others)
    ]
    for what, predicted in (("a model left out", np.array(left_out)), ("stated", made @ stated + beside)):
        off = predicted / took - 1
        print(f"{what}: {np.median(abs(off)):.1%} in the median, {max(abs(off)):.0%} at worst, of {len(off)}")
        for error, name in sorted(zip(off, names, strict=True)):
            print(f"  {name:40} {error:+.0%}")


if __name__ == "__main__":
    main()
