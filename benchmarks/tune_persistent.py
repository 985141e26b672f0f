"""Times the variants of the persistent recurrent kernels on this GPU and writes which is fastest.

    PYTHONPATH=src python benchmarks/tune_persistent.py --out tuned.json
    PYTHONPATH=src python benchmarks/tune_persistent.py --cells lstm --hidden 1024 --batches 8 --top 20
    PYTHONPATH=src python benchmarks/tune_persistent.py --around RESULTS --focus '/1024/8/' 40 --budget-s 60
    PYTHONPATH=src python benchmarks/tune_persistent.py --merge RESULTS tuned.json --out RESULTS --install

with RESULTS = benchmarks/results/tune_persistent_h200.json.

For each problem (cell, hidden size, mini-batch, direction of time) the variants predicted to be fastest are
checked against the plain PyTorch reference in float32 and timed: median of several launches of all time steps
with the filling of the exchange buffer, between CUDA events, on random data; a forward kernel both as in
training and as in inference. Where a variant may pause, it is timed with several pauses, and the best one
stands for it. Each is timed as soon as it is compiled, while all processors compile the next. Problems of
`--focus` come first, then those that take several rounds, so that a budget of seconds leaves out what matters
least. `--around FILE` measures again the fastest of an earlier result with what is near them, and of the
others only those not measured there. `--install` writes the winners into the package.

`--merge FILE...` measures nothing: it makes one result of several, in which a later file's row replaces an
earlier one's of the same variant, whatever their pauses. `--fit FILE` neither: it fits what a step's work
costs to the rows of a result, for sizes that were not measured, and says how much slower than the fastest
measured variant the one so predicted is, of hidden sizes that were left out of the fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilefit.rnn import reference
from tilefit.rnn.cells import CELLS, Grads, Rows
from tilefit.rnn.persistent import build, launch
from tilefit.rnn.persistent.choice import entry, key
from tilefit.rnn.persistent.launch import Kernel, LaunchError, failure
from tilefit.rnn.persistent.variant import UNITS, Capacity, Problem, Variant, predicted_s, variants, work

#: A measured variant: `problem`, the fields of the `variant`, `us` (and `inference_us`) a step, `error`.
Row = dict[str, Any]

#: Relative error of a right variant at most: some roundings to bfloat16.
TOLERANCE = 0.02

#: Clocks to try.
PAUSES = (0, 150, 300, 450, 600, 800)

PACKAGE = Path(__file__).parent.parent / "src" / "tilefit" / "rnn" / "persistent" / "h200.json"


def planned(
    options: argparse.Namespace, capacity: Capacity, earlier: list[Row]
) -> list[tuple[Problem, list[Variant]]]:
    """What is to be measured of each problem: those in focus first, then those of several rounds."""
    pattern, focus_top = options.focus
    names = (options.cells.split(","), options.kernels.split(","))
    sizes = (options.directions, options.hidden, options.batches)
    plan = []
    for cell, kernel, directions, hidden, batch in itertools.product(
        *names, *(map(int, text.split(",")) for text in sizes)
    ):
        problem = Problem(CELLS[cell], options.dtype, hidden, batch, directions, kernel == "backward")
        in_focus = re.search(pattern, key(problem)) is not None
        top = int(focus_top) if in_focus else options.top
        rows = [row for row in earlier if row["problem"] == key(problem)]
        measured = {cut(Variant(*row["variant"])) for row in rows}
        chosen = neighbours(problem, capacity, rows) if rows else []
        chosen += [
            variant
            for variant in candidates(problem, capacity, top, options.alike)
            if cut(variant) not in measured and variant not in chosen
        ]
        several = bool(chosen) and chosen[0].rounds > 1
        plan.append(((not in_focus, not several), problem, chosen))
    plan.sort(key=lambda entry: entry[0])
    return [(problem, chosen) for _, problem, chosen in plan]


def candidates(problem: Problem, capacity: Capacity, top: int, alike: int) -> list[Variant]:
    """The variants predicted to be fastest, at most ``alike`` that differ in their units only."""
    ordered = sorted(variants(problem, capacity), key=lambda v: predicted_s(problem, v))
    taken: dict[tuple[object, ...], int] = {}
    chosen = []
    for variant in ordered:
        kind = *_kind(variant), variant.ahead
        if taken.get(kind, 0) < alike:
            taken[kind] = taken.get(kind, 0) + 1
            chosen.append(variant)
        if len(chosen) == top:
            break
    return chosen


def neighbours(problem: Problem, capacity: Capacity, rows: list[Row]) -> list[Variant]:
    """Around the two fastest measured cuts: themselves, those of one size of a block more or less, and all
    these both with and without copying ahead, so that one run compares them. Of the two, also their tunings:
    the compiler often has room for more in registers than was reckoned with."""
    fastest = list(dict.fromkeys(cut(Variant(*row["variant"])) for row in sorted(rows, key=rank)))[:2]
    near: dict[Variant, None] = {}
    for variant in variants(problem, capacity):
        steps = [
            abs(UNITS.index(variant.units) - UNITS.index(fast.units))
            for fast in fastest
            if _kind(variant) == _kind(fast)
        ]
        if steps and min(steps) <= 1:
            near[variant] = None
        if cut(variant) in fastest:
            near |= dict.fromkeys(tunings(problem, capacity, variant))
    return list(near)


def tunings(problem: Problem, capacity: Capacity, variant: Variant) -> Iterator[Variant]:
    """What may be faster: to copy a little earlier, more weights or more pieces in registers."""
    pieces = variant.slabs(problem) * variant.tiles
    modes = (variant.ahead, variant.ahead - 1) if variant.ahead else (0,)
    windows = {variant.window} if variant.ahead else {min(window, pieces) for window in (4, 8)}
    for ahead, window, more in itertools.product(modes, windows, (0, 2, 4)):
        tuned = variant._replace(ahead=ahead, window=window, held=variant.held + more)
        if tuned.held <= tuned.fragments(problem) and tuned.shared_bytes(problem) <= capacity.shared_bytes:
            yield tuned


def cut(variant: Variant) -> Variant:
    """A variant without what is tuned for it."""
    return variant._replace(held=0, window=0, ahead=0, pause=0)


def _kind(variant: Variant) -> tuple[object, ...]:
    return variant.split, variant.mail, variant.warps, variant.rounds, variant.tiles


def merged(files: list[Path]) -> dict[str, Any]:
    """One result of several of the same GPU, without variants that the kernels can no longer be cut to."""
    documents = [json.loads(file.read_text("utf-8")) for file in files]
    newest = documents[-1]
    rows = {}
    for file, document in zip(files, documents, strict=True):
        for name in ("gpu", "steps", "clusters", "variant_columns"):
            if document[name] != newest[name]:
                sys.exit(
                    f"{file}: its {name} are not those of {files[-1]}: results of one kind can be merged"
                )
        for row in document["rows"]:
            rows[row["problem"], Variant(*row["variant"])._replace(pause=0)] = row
    capacity = Capacity(newest["multiprocessors"], tuple(newest["clusters"]))
    problems = {row["problem"]: _problem_of(row)[0] for row in rows.values()}
    cuts = {name: {cut(v) for v in variants(problem, capacity)} for name, problem in problems.items()}
    kept = [
        row
        for (name, variant), row in rows.items()
        if cut(variant) in cuts[name] and variant.shared_bytes(problems[name]) <= capacity.shared_bytes
    ]
    print(f"{len(kept)} variants of {len(problems)} problems; {len(rows) - len(kept)} can no longer be cut")
    return {**newest, "rows": sorted(kept, key=lambda row: list(problems).index(row["problem"]))}


def rows_of(file: Path) -> list[Row]:
    """The variants of a result that ran."""
    return [row for row in json.loads(file.read_text("utf-8"))["rows"] if "us" in row]


def rank(row: Row) -> tuple[bool, float]:
    """Orders a problem's variants, best first: by training and inference where both were measured."""
    return "inference_us" not in row, row["us"] + row.get("inference_us", 0.0)


def store(document: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes a result, and into the package the fastest right variant of each of its problems."""
    head = {name: value for name, value in document.items() if name != "rows"}
    if options.out:
        rows = [
            {
                name: float(f"{value:.4g}") if isinstance(value, float) else value
                for name, value in row.items()
            }
            for row in document["rows"]
        ]
        options.out.write_text(_json(head, "rows", "[]", map(json.dumps, rows)), "utf-8")
    if options.install:
        winners = json.loads(PACKAGE.read_text("utf-8"))["variants"]
        right = [row for row in document["rows"] if "us" in row and row["error"] < TOLERANCE]
        for row in sorted(right, key=rank, reverse=True):
            winners[row["problem"]] = entry(Variant(*row["variant"]))
        head = {name: head[name] for name in ("gpu", "torch", "cuda", "date")}
        entries = (f"{json.dumps(name)}: {json.dumps(cut)}" for name, cut in winners.items())
        PACKAGE.write_text(_json(head, "variants", "{}", entries), "utf-8")


def _json(head: dict[str, Any], name: str, brackets: str, entries: Iterable[str]) -> str:
    """A document that ends in a list or mapping with one entry a line."""
    listed = ",\n".join(entries)
    return f"{json.dumps(head)[:-1]}, {json.dumps(name)}: {brackets[0]}\n{listed}\n{brackets[1]}}}\n"


def fit(rows: list[dict[str, Any]]) -> None:
    """Prints ``MICROSECONDS`` of variant.py, by least squares of the relative error, no cost below zero."""
    measured = [(*_problem_of(row), float(row["us"])) for row in rows]
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


def compiled(
    plan: list[tuple[Problem, list[Variant]]], capability: tuple[int, int], until: float
) -> Iterator[tuple[Problem, Variant]]:
    """The plan's variants in its order, each when it is compiled, until a time of ``time.perf_counter()``.

    Those that come later are compiled while the caller works on one.
    """
    todo = [(problem, variant) for problem, chosen in plan for variant in chosen]
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(
                build.binary,
                "backward" if problem.backward else "forward",
                variant.constants(problem),
                capability,
            )
            for problem, variant in todo
        ]
        for index, (job, each) in enumerate(zip(jobs, todo, strict=True)):
            left_s = until - time.perf_counter()
            if left_s <= 0 or wait([job], left_s).not_done:
                print(f"out of time: {len(todo) - index} of {len(todo)} variants not measured")
                pool.shutdown(wait=False, cancel_futures=True)
                return
            job.result()  # raises what the compiler raised
            yield each


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
            Rows(h0.float(), wide(c0)),
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
            Grads(grad_out[-checked:].float(), grad_hn.float(), grad_cn.float() if is_lstm else None),
            (result.out, result.gates, result.c),
            weights.float(),
            Rows(h0.float(), wide(c0)),
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


def measure(problem: Problem, variant: Variant, data: Data, steps: int, repeats: int) -> Row:
    """Microseconds a step; of a forward kernel that saves something for the backward pass, also without. Of
    several pauses the best one, or one that gave wrong results."""
    rows = []
    kernel = Kernel(problem, variant, torch.cuda.current_device())
    registers, spilled = kernel.registers()
    for pause in PAUSES if variant.pause else (0,):
        kernel.variant = variant._replace(pause=pause)
        us, result = timed(kernel, data, data.tensors, steps, repeats)
        row: Row = {"variant": list(kernel.variant), "us": us}
        row |= {"error": data.error(result, problem), "registers": registers, "spilled": spilled}
        if not problem.backward and problem.cell.saved:
            unsaved = {**data.tensors, "gates": None, "cells": None}
            row["inference_us"], _ = timed(kernel, data, unsaved, steps, repeats)
        rows.append(row)
    return min(rows, key=lambda row: (row["error"] < TOLERANCE, *rank(row)))


def timed(
    kernel: Kernel, data: Data, tensors: dict[str, torch.Tensor | None], steps: int, repeats: int
) -> tuple[float, torch.Tensor]:
    """The median of the launches after the first, and the last one's result."""
    times = []
    for _ in range(repeats + 1):
        result = data.tensors["weights"].new_empty(data.shape)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel.launch({"lengths": None, "resets": None, **tensors, data.result: result}, steps)
        end.record()
        end.synchronize()
        if int(failure(torch.cuda.current_device())[0]):
            raise LaunchError("gave up waiting")
        times.append(begin.elapsed_time(end) * 1e3 / steps)
    return statistics.median(times[1:]), result


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
    parser.add_argument(
        "--focus",
        nargs=2,
        default=("$^", 0),
        metavar=("PATTERN", "TOP"),
        help="another --top for some problems",
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing; merge results"
    )
    options = parser.parse_args()
    if options.fit:
        fit(rows_of(options.fit))
        return
    if options.merge:
        store(merged(options.merge), options)
        return
    launch.SPIN_LIMIT = 1 << 17  # a variant that hangs costs a tenth of a second
    capacity = launch.capacity(0)
    print(capacity)
    capability = torch.cuda.get_device_capability()
    started = time.perf_counter()
    plan = planned(options, capacity, rows_of(options.around) if options.around else [])
    for problem, chosen in plan:
        if not chosen:
            print(f"{key(problem):32} does not fit")
    rows: list[Row] = []
    ready = compiled(plan, capability, started + options.budget_s)
    for problem, its_variants in itertools.groupby(ready, key=lambda entry: entry[0]):
        data = Data(problem, options.steps, getattr(torch, options.dtype))
        found = []
        for _, variant in its_variants:
            row: Row = {
                "problem": key(problem),
                "variant": list(variant),
                "predicted_us": predicted_s(problem, variant) * 1e6,
            }
            try:
                row |= measure(problem, variant, data, options.steps, options.repeats)
            except LaunchError as error:
                failure(0).zero_()
                row["refused"] = str(error)[:200]
            rows.append(row)
            if "us" in row and row["error"] < TOLERANCE:
                found.append((Variant(*row["variant"]), row))
            elif "us" in row:
                print(f"WRONG {key(problem)} {variant} error {row['error']}")
        if not found:
            print(f"{key(problem):32} nothing ran")
            continue
        found.sort(key=lambda entry: rank(entry[1]))
        variant, row = found[0]
        inference = f", {row['inference_us']:.2f} in inference" if "inference_us" in row else ""
        exchange = "mail" if variant.mail else f"S{variant.split}"
        print(
            f"{key(problem):32} {row['us']:6.2f} us{inference} "
            f"(predicted {row['predicted_us']:.2f}; error {row['error']:.1e}) "
            f"U{variant.units} P{variant.blocks} {exchange} T{variant.tiles} R{variant.rounds} "
            f"G{variant.batch_groups} W{variant.warps} h{variant.held} A{variant.ahead} p{variant.pause} "
            f"regs {row['registers']}/{row['spilled']} ; others",
            *(f"{other['us']:.2f}" for _, other in found[1:5]),
            flush=True,
        )
    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        "steps": options.steps,
        "multiprocessors": capacity.multiprocessors,
        "clusters": capacity.clusters,
        "variant_columns": [*Variant._fields],
        "rows": rows,
    }
    store(document, options)


if __name__ == "__main__":
    sys.exit(main())
