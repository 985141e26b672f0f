"""What compiled code takes of the host, from recorded steps that the host limits; and how it varies.

    PYTHONPATH=src python benchmarks/fit_compiled.py

Of the steps that were measured in turn with the reference step (``compiled_steps.py --alternate-s``,
``results/compiled_turns_*.json``, ``compiled_held_*.json``), those that the host limits, over the calls
that the compiler's code makes (``--pack rows --code code.tar.gz`` counts them) and the parameters. What a
parameter takes is given from elsewhere (``tilefit.cost.launch``). Each model is left out in turn; printed
are the errors of these, and of what is stated.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from tilefit.cost.launch import (
    COMPILED_CALL_S,
    COMPILED_KERNEL_S,
    FIXED_S,
    GIVEN_S,
    GRAPH_PARAMETER_S,
    GRAPH_S,
    OPTIMIZER_S,
    REFERENCE_STEP_S,
    UPDATE_S,
)

RESULTS = Path(__file__).parent / "results"
TURNS = (
    "compiled_turns_h100.json",
    "compiled_turns_second_h100.json",
    "compiled_held_h200.json",
    "compiled_held_second_h200.json",
)
#: Of two turns of each step, with a reference before each.
TWO_TURNS = ("compiled_newer_h100.json", "compiled_later_h100.json", "compiled_calls_h100.json")
#: Times as long as the GPU's kernels from which a step is the host's.
LIMITED = 1.25
PRODUCTS = ("mm", "addmm", "bmm")
#: What is fitted; in seconds, what is likely where few rows settle it, and what is stated.
_CONV_S = COMPILED_CALL_S["conv"]
PARTS = {
    "a step": (0.9e-3, 2 * GRAPH_S + FIXED_S["optimizer"] + 8 * OPTIMIZER_S),
    "a kernel": (12e-6, COMPILED_KERNEL_S),
    "a product": (12e-6, COMPILED_CALL_S["gemm"]),
    "a convolution": (30e-6, _CONV_S),
    "its gradients": (60e-6, 2 * _CONV_S),
    "attention": (60e-6, COMPILED_CALL_S["attention"]),
    "a tensor given": (12e-6, GIVEN_S),
}
#: How much that counts against one row, squared, and errors from which a row counts for less.
PRIOR, ROBUST = 0.003, 0.1


def spent_s(rows: list[dict[str, Any]]) -> float:
    """A step on the stated host: of each process the median over the reference beside it, and their mean."""
    each = []
    for row in rows:
        beside = zip(row["sustained_turns_ms"], row["reference_turns_ms"], row["after_turns_ms"], strict=True)
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
    twice = [rows for rows in limited().values() if len(rows) > 1]
    spread = [abs(spent_s(rows[:1]) / spent_s(rows[1:]) - 1) for rows in twice]
    print(
        f"{len(spread)} steps in two processes, over the reference in turn with them, differ by "
        f"{statistics.median(spread):.0%} in the median, {max(spread):.0%} at most"
    )


def limited() -> dict[str, list[dict[str, Any]]]:
    """By model, the rows of the steps that the host limits and whose calls are counted."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in (row for name in TURNS for row in json.loads((RESULTS / name).read_text())["rows"]):
        if "wall_ms" in row:
            by_model.setdefault(row["model"], []).append(row)
    return {
        name: rows
        for name, rows in by_model.items()
        if rows[0].get("calls")
        and statistics.median(rows[0]["sustained_turns_ms"]) >= LIMITED * rows[0].get("gpu_ms", 0.0)
    }


def counted(calls: dict[str, dict[str, int]]) -> list[int]:
    """As many as there are of :data:`PARTS`."""
    forward, backward = calls["forward"], calls["backward"]

    def both(*names: str) -> int:
        return sum(graph.get(name, 0) for graph in (forward, backward) for name in names)

    convolutions = both("convolution"), both("convolution_backward")
    return [1, both("run"), both(*PRODUCTS), *convolutions, both("attention"), backward["given"]]


def fitted(counts: np.ndarray, spent: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Seconds of each part, none negative, by errors over what a step takes."""
    likely = np.array([prior for prior, _ in PARTS.values()])
    found, shares = likely.copy(), counts / spent[:, None]
    wanted = 1 - given / spent
    for _ in range(40):
        weights = (1 + ((shares @ found - wanted) / ROBUST) ** 2) ** -0.25
        left = np.vstack([shares * weights[:, None], PRIOR**0.5 * np.diag(1 / likely)])
        right = np.concatenate([weights * wanted, np.full(len(likely), PRIOR**0.5)])
        square, product = left.T @ left, left.T @ right
        for _ in range(300):  # one after another, which keeps them from being negative
            for i in range(len(found)):
                rest = product[i] - square[i] @ found + square[i, i] * found[i]
                found[i] = max(0.0, rest / square[i, i])
    return found


def main() -> None:
    varied()
    names, counts, spent, given = [], [], [], []
    for name, rows in limited().items():
        names.append(name)
        counts.append(counted(rows[0]["calls"]))
        spent.append(spent_s(rows))
        given.append((UPDATE_S + GRAPH_PARAMETER_S) * rows[0]["calls"]["parameters"])
    made, took, beside = np.array(counts, float), np.array(spent), np.array(given)
    stated = np.array([each for _, each in PARTS.values()])
    best = fitted(made, took, beside)
    for part, each, says in zip(PARTS, best, stated, strict=True):
        print(f"{part:16} {1e6 * each:7.1f} us, stated {1e6 * says:7.1f}")
    others = [np.arange(len(names)) != i for i in range(len(names))]
    left_out = [
        made[i] @ fitted(made[keep], took[keep], beside[keep]) + beside[i] for i, keep in enumerate(others)
    ]
    for what, predicted in (("a model left out", np.array(left_out)), ("stated", made @ stated + beside)):
        off = predicted / took - 1
        print(f"{what}: {np.median(abs(off)):.1%} in the median, {max(abs(off)):.0%} at worst, of {len(off)}")
        for error, name in sorted(zip(off, names, strict=True)):
            print(f"  {name:40} {error:+.0%}")


if __name__ == "__main__":
    main()
