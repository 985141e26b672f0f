"""Times the variants of the persistent recurrent kernels on this GPU and writes which is fastest.

    PYTHONPATH=src python benchmarks/tune_persistent.py --out tuned.json
    PYTHONPATH=src python benchmarks/tune_persistent.py --cells lstm --hidden 1024 --batches 8 --top 20

For each problem (cell, hidden size, mini-batch, direction of time) the variants predicted to be fastest, or
those near the fastest of an earlier result (`--around`), are compiled in parallel, checked against the plain
PyTorch reference in float32, and timed: median of several launches of all time steps, between CUDA events, on
random data. `--install` writes the winners into the package.

`--fit FILE` measures nothing: it fits what a step's work costs to the rows of an earlier result, for sizes
that were not measured, and says how much slower than the fastest measured variant the one so predicted is, of
hidden sizes that were left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilefit.rnn import reference
from tilefit.rnn.cells import CELLS
from tilefit.rnn.persistent import build, launch
from tilefit.rnn.persistent.choice import _cut, key
from tilefit.rnn.persistent.launch import Kernel, LaunchError, failure
from tilefit.rnn.persistent.layer import _unwritten
from tilefit.rnn.persistent.variant import UNITS, Capacity, Problem, Variant, predicted_s, variants, work

PACKAGE = Path(__file__).parent.parent / "src" / "tilefit" / "rnn" / "persistent" / "h200.json"


def candidates(problem: Problem, capacity: Capacity, top: int, alike: int) -> list[Variant]:
    """The variants predicted to be fastest, at most ``alike`` that differ in their units only."""
    ordered = sorted(variants(problem, capacity), key=lambda v: predicted_s(problem, v))
    taken: dict[tuple[int, ...], int] = {}
    chosen = []
    for variant in ordered:
        kind = (variant.split, variant.mail, variant.warps, variant.rounds, variant.tiles)
        if taken.get(kind, 0) < alike:
            taken[kind] = taken.get(kind, 0) + 1
            chosen.append(variant)
        if len(chosen) == top:
            break
    return chosen


def neighbours(problem: Problem, capacity: Capacity, rows: list[dict[str, object]]) -> list[Variant]:
    """Variants that differ from the two fastest measured ones in their units alone, by at most two steps."""
    measured = sorted((row for row in rows if "us" in row), key=lambda row: row["us"])[:2]
    chosen: list[Variant] = []
    for row in measured:
        best = Variant(*row["variant"])
        for variant in variants(problem, capacity):
            same = all(
                getattr(variant, name) == getattr(best, name)
                for name in ("split", "mail", "tiles", "rounds", "warps")
            )
            near = abs(UNITS.index(variant.units) - UNITS.index(best.units)) <= 2
            if same and near and variant not in chosen:
                chosen.append(variant)
    return chosen


def fit(rows: list[dict[str, Any]]) -> None:
    """Prints ``MICROSECONDS`` of variant.py, by least squares of the relative error, no cost below zero."""
    measured = [(*_problem_of(row), float(row["us"])) for row in rows if "us" in row]
    names = list(work(*measured[0][:2]))
    table = np.array([[work(problem, variant)[name] for name in names] for problem, variant, _ in measured])
    times = np.array([time_us for _, _, time_us in measured])
    hidden = np.array([problem.hidden for problem, _, _ in measured])
    predicted = np.empty_like(times)
    for size in set(hidden):
        others = hidden != size
        predicted[~others] = table[~others] @ _costs(table[others], times[others])
    slower = []
    keys = np.array([key(problem) for problem, _, _ in measured])
    for name in dict.fromkeys(keys):
        of_problem = np.flatnonzero(keys == name)
        slower.append(times[of_problem[predicted[of_problem].argmin()]] / times[of_problem].min())
    for name, cost in zip(names, _costs(table, times), strict=True):
        print(f'    "{name}": {cost:.3g},')
    print(
        f"{len(times)} variants of {len(slower)} problems; hidden sizes left out: median error "
        f"{np.median(abs(predicted / times - 1)):.1%}, slower than the fastest by "
        f"{np.exp(np.log(slower).mean()) - 1:.1%} (geometric mean), {max(slower) - 1:.0%} at most"
    )


def _problem_of(row: dict[str, Any]) -> tuple[Problem, Variant]:
    cell, kernel, bits, hidden, tiles, directions = row["problem"].split("/")
    element = "float32" if bits == "32" else "bfloat16"
    sizes = int(hidden), int(tiles) * 8, int(directions)
    return Problem(CELLS[cell], element, *sizes, backward=kernel == "backward"), Variant(*row["variant"])


def _costs(table: np.ndarray, times: np.ndarray) -> np.ndarray:
    costs, used = np.zeros(table.shape[1]), np.arange(table.shape[1])
    while True:
        found = np.linalg.lstsq(table[:, used] / times[:, None], np.ones_like(times), rcond=None)[0]
        if (found >= 0).all():
            costs[used] = found
            return costs
        used = np.delete(used, found.argmin())


def compile_one(job: tuple[str, dict[str, int], tuple[int, int]]) -> float:
    started = time.perf_counter()
    build.binary(*job)
    return time.perf_counter() - started


class Data:
    """Random tensors of one problem, and what the reference makes of them."""

    def __init__(self, problem: Problem, steps: int, dtype: torch.dtype) -> None:
        cell, hidden, batch, directions = problem.cell, problem.hidden, problem.batch, problem.directions
        torch.manual_seed(hidden * 1000 + batch)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device="cuda") * scale).to(dtype)

        is_lstm = cell.has_c
        weights = random(directions, cell.gates * hidden, hidden, scale=0.5 * hidden**-0.5)
        projected = random(steps, batch, directions, cell.gates * hidden)
        bias_n = random(directions, hidden) if cell.is_gru else None
        h0 = random(directions, batch, hidden).tanh()
        c0 = random(directions, batch, hidden) if is_lstm else None

        def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.float()

        checked = min(steps, 24)
        self.checked = checked
        result = reference.forward(
            cell,
            projected[:checked].float(),
            weights.float(),
            wide(bias_n),
            h0.float(),
            wide(c0),
            None,
            None,
            save=True,
        )
        if not problem.backward:
            self.expected = result.out
            self.tensors = {
                "projected": projected,
                "weights": weights,
                "bias_n": bias_n,
                "h0": h0,
                "c0": c0,
                "out": None,
                "gates": projected.new_empty(steps, batch, directions, cell.saved * hidden)
                if cell.saved
                else None,
                "cells": torch.empty(steps, batch, directions, hidden, device="cuda") if is_lstm else None,
                "last_hidden": torch.empty_like(h0),
                "last_cell": torch.empty_like(h0) if is_lstm else None,
            }
            self.result, self.shape = "out", (steps, batch, directions, hidden)
            return
        grad_out = random(steps, batch, directions, hidden)
        grad_hn, grad_cn = random(directions, batch, hidden), random(directions, batch, hidden)
        # The last `checked` steps of the sequence are what the reference repeats.
        grad = reference.backward(
            cell,
            grad_out[-checked:].float(),
            grad_hn.float(),
            grad_cn.float() if is_lstm else None,
            (result.out, result.gates, result.c),
            weights.float(),
            h0.float(),
            wide(c0),
            None,
            None,
        )
        self.expected = grad.dg
        gates = weights.view(directions, cell.gates, hidden, hidden)
        gates = gates.roll(1, 1) if cell.is_gru else gates

        def tail(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
            if tensor.numel() == 0:
                return None
            full = torch.rand(steps, *tensor.shape[1:], device="cuda", dtype=dtype)
            full[-checked:] = tensor.to(dtype)
            return full

        self.tensors = {
            "grad_out": grad_out,
            "grad_last_h": grad_hn,
            "grad_last_c": grad_cn if is_lstm else None,
            "weights": gates.permute(0, 3, 1, 2).contiguous(),
            "out": tail(result.out, dtype),
            "gates": tail(result.gates, dtype),
            "cells": tail(result.c, torch.float32) if is_lstm else None,
            "h0": h0,
            "first_cell": wide(c0),
            "grad_gates": None,
            "grad_h0": torch.empty_like(h0),
            "grad_c0": torch.empty_like(h0) if is_lstm else None,
        }
        self.result, self.shape = "grad_gates", (steps, batch, directions, cell.gradients * hidden)

    def error(self, result: torch.Tensor, problem: Problem) -> float:
        """Relative error of the steps that the reference computed."""
        part = result[-self.checked + 1 :] if problem.backward else result[: self.checked]
        expected = self.expected[1:] if problem.backward else self.expected
        return float((part.float() - expected).norm() / expected.norm())


def measure(problem: Problem, variant: Variant, data: Data, steps: int, repeats: int) -> dict[str, object]:
    kernel = Kernel(problem, variant, torch.cuda.current_device())
    times = []
    error = float("nan")
    for repeat in range(repeats + 1):
        result = _unwritten(data.tensors["weights"], data.shape)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        absent = {"lengths": None, "resets": None}
        kernel.launch({**absent, **data.tensors, data.result: result}, steps)
        end.record()
        end.synchronize()
        if int(failure(torch.cuda.current_device())[0]):
            raise LaunchError("gave up waiting")
        if repeat == 0:
            error = data.error(result, problem)
        else:
            times.append(begin.elapsed_time(end) * 1e3 / steps)
    registers, spilled = kernel.registers()
    return {"us": statistics.median(times), "error": error, "registers": registers, "spilled": spilled}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", default="lstm,gru,rnn_tanh")
    parser.add_argument("--hidden", default="256,512,768,1024,1536,2048")
    parser.add_argument("--batches", default="8,16,32,64")
    parser.add_argument("--kernels", default="forward,backward")
    parser.add_argument("--directions", default="1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--alike", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument("--around", type=Path, help="try what is near the fastest of an earlier result")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="measure nothing; fit the costs to a result")
    parser.add_argument("--install", action="store_true", help="write the winners into the package")
    options = parser.parse_args()
    if options.fit:
        fit(json.loads(options.fit.read_text("utf-8"))["rows"])
        return
    launch.SPIN_LIMIT = 1 << 17  # a variant that hangs costs a tenth of a second
    capacity = launch.capacity(0)
    print(capacity)
    capability = torch.cuda.get_device_capability()
    earlier: dict[str, list[dict[str, object]]] = {}
    if options.around:
        for row in json.loads(options.around.read_text())["rows"]:
            earlier.setdefault(row["problem"], []).append(row)
    started = time.perf_counter()
    plan = []
    for cell in options.cells.split(","):
        for directions in map(int, options.directions.split(",")):
            for hidden in map(int, options.hidden.split(",")):
                for batch in map(int, options.batches.split(",")):
                    for kernel in options.kernels.split(","):
                        problem = Problem(
                            CELLS[cell], options.dtype, hidden, batch, directions, kernel == "backward"
                        )
                        known = earlier.get(key(problem), [])
                        around = neighbours(problem, capacity, known)
                        plan.append(
                            (problem, around or candidates(problem, capacity, options.top, options.alike))
                        )
    jobs = [
        ("backward" if problem.backward else "forward", variant.constants(problem), capability)
        for problem, chosen in plan
        for variant in chosen
    ]
    with ProcessPoolExecutor() as pool:
        seconds = list(pool.map(compile_one, jobs, chunksize=4))
    elapsed = time.perf_counter() - started
    print(f"{len(jobs)} variants compiled in {elapsed:.0f} s ({sum(seconds):.0f} s of work)")
    rows, winners = [], {}
    for problem, chosen in plan:
        if time.perf_counter() - started > options.budget_s:
            print("out of time")
            break
        if not chosen:
            print(f"{key(problem):32} does not fit")
            continue
        data = Data(problem, options.steps, getattr(torch, options.dtype))
        found = []
        for variant in chosen:
            row: dict[str, object] = {
                "problem": key(problem),
                "variant": list(vars(variant).values()),
                "predicted_us": predicted_s(problem, variant) * 1e6,
            }
            try:
                row |= measure(problem, variant, data, options.steps, options.repeats)
            except LaunchError as error:
                failure(0).zero_()
                row["refused"] = str(error)[:200]
            rows.append(row)
            if "us" in row and row["error"] < 0.02:
                found.append((row["us"], variant, row))
            elif "us" in row:
                print(f"WRONG {key(problem)} {variant} error {row['error']}")
        if not found:
            print(f"{key(problem):32} nothing ran")
            continue
        found.sort(key=lambda entry: entry[0])
        _, variant, row = found[0]
        winners[key(problem)] = _cut(variant)
        exchange = "mail" if variant.mail else f"S{variant.split}"
        print(
            f"{key(problem):32} {row['us']:6.2f} us "
            f"(predicted {row['predicted_us']:.2f}; error {row['error']:.1e}) "
            f"U{variant.units} P{variant.blocks} {exchange} T{variant.tiles} R{variant.rounds} "
            f"G{variant.batch_groups} W{variant.warps} h{variant.held} "
            f"regs {row['registers']}/{row['spilled']} ; others",
            *(f"{us:.2f}" for us, _, _ in found[1:5]),
            flush=True,
        )
    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        "steps": options.steps,
        "clusters": capacity.clusters,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(document))
    if options.install:
        stored = json.loads(PACKAGE.read_text())["variants"] if PACKAGE.is_file() else {}
        stored |= winners
        head = {name: document[name] for name in ("gpu", "torch", "cuda", "date")}
        PACKAGE.write_text(json.dumps({**head, "variants": stored}, indent=0) + "\n")


if __name__ == "__main__":
    sys.exit(main())
