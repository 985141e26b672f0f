"""How far off the times of collectives are, and the constants of links that they rest on.

    PYTHONPATH=src python benchmarks/collectives.py --tables nccl_collectives.csv.gz [--fit] [--record]

The tables (ai-dynamo/aiconfigurator, NCCL 2.23 to 2.29 on 2, 4 and 8 GPUs of one machine) are not part of
this project: a CSV with the columns ``system, op_name, num_gpus, bytes, nccl_dtype, t``. ``--fit`` fits the
constants of NVLink 4 to H100 and of NVLink 3 to A100, to the sizes that are even powers of two; the errors
are those of the odd ones. H200 sets no constant. ``left out`` prices a system with the constants of another
generation: A100 with those of H100, H100 and H200 with those of A100. The own measurements (torch 2.11, NCCL
by ``torch.distributed``, 2 and 4 H200, NVLink's multicast off) set no constant either.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from math import log
from pathlib import Path

import numpy as np

from tilefit import gpus
from tilefit.cost.links import FITTED, Fabric, Group, LinkConstants
from tilefit.ops.collective import ring_bytes

RESULTS = Path(__file__).parent / "results" / "collectives.json"
SYSTEMS = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm", "h200_sxm": "h200"}
FUNCTIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
SMALLEST = 64 * 1024
#: Bus bandwidth in GB/s at 16, 64, 256 and 1024 MiB, by function and ranks.
OWN = {
    ("all-reduce", 2): (215, 254, 295, 323),
    ("all-reduce", 4): (246, 301, 332, 353),
    ("all-gather", 2): (150, 205, 239, 267),
    ("all-gather", 4): (185, 259, 301, 323),
}
#: System, function, ranks, bytes, whether a switch could sum it up, seconds.
Row = tuple[str, str, int, int, bool, float]


def rows(tables: Path) -> list[Row]:
    """A row for each system, function, number of GPUs, size and type: the median of the versions."""
    found: dict[tuple[str, str, int, int, bool], list[float]] = defaultdict(list)
    opened = gzip.open if tables.suffix == ".gz" else open
    with opened(tables, "rt") as file:
        for row in csv.DictReader(file):
            function = FUNCTIONS[row["op_name"]]
            key = (
                row["system"],
                function,
                int(row["num_gpus"]),
                int(row["bytes"]),
                row["nccl_dtype"] == "half",
            )
            found[key].append(float(row["t"]))
    return [(*key, statistics.median(times)) for key, times in found.items()]


def own_rows() -> list[Row]:
    """The own measurements; without multicast nothing is summed up by the switch."""
    made: list[Row] = []
    for (function, ranks), rates in OWN.items():
        for size, rate in zip((16, 64, 256, 1024), rates, strict=True):
            time_s = ring_bytes(function, size * 2**20, ranks) / (rate * 1e9)
            made.append(("h200_sxm", function, ranks, size * 2**20, False, time_s))
    return made


def ratio(row: Row, constants: LinkConstants | None = None) -> float:
    """Predicted over measured."""
    system, function, ranks, size, sums, measured_s = row
    fabric = Fabric(gpus.get(SYSTEMS[system]), constants=constants)
    return fabric.time_s(function, size, Group(ranks, ranks), sums=sums) / measured_s


def fit(chosen: Sequence[Row], start: LinkConstants) -> LinkConstants:
    """The constants with the least log errors, small messages counting a third: damped Gauss-Newton."""
    names = [each.name for each in fields(start) if each.name != "spread" and getattr(start, each.name)]
    weights = np.array([1.0 if row[3] >= SMALLEST else 1 / 3 for row in chosen])

    def made(values: np.ndarray) -> LinkConstants:
        return replace(start, **dict(zip(names, map(float, np.exp(values)), strict=True)))

    def residuals(values: np.ndarray) -> np.ndarray:
        errors = np.array([log(ratio(row, made(values))) for row in chosen]) * weights
        return np.sign(errors) * np.sqrt(np.sqrt(1 + (errors / 0.1) ** 2) - 1)  # outliers count linearly

    at = np.log([getattr(start, name) for name in names])
    now, damping = residuals(at), 1e-2
    for _ in range(40):
        slopes = np.stack([(residuals(at + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        moved = at - np.linalg.solve(square + damping * np.eye(len(at)), slopes.T @ now)
        after = residuals(moved)
        if after @ after < now @ now:
            settled = now @ now - after @ after < 1e-6 * (now @ now)
            at, now, damping = moved, after, damping / 4
            if settled:
                break
        else:
            damping *= 8
    return made(at)


def errors(chosen: Iterable[Row], constants: LinkConstants | None = None) -> dict[str, float]:
    """Errors of the rows of at least 64 KiB."""
    off = sorted(abs(ratio(row, constants) - 1) for row in chosen if row[3] >= SMALLEST)
    return {
        "rows": len(off),
        "median": round(statistics.median(off), 4),
        "p90": round(off[int(0.9 * len(off))], 4),
        "worst": round(off[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    parser.add_argument("--record", action="store_true", help="write the errors into results/")
    options = parser.parse_args()
    found = rows(options.tables)
    of = {system: [row for row in found if row[0] == system] for system in SYSTEMS}
    held = {system: [row for row in own if row[3].bit_length() % 2 == 0] for system, own in of.items()}
    if options.fit:
        for link, system in (("NVLink 3", "a100_sxm"), ("NVLink 4", "h100_sxm")):
            part = [row for row in of[system] if row[3].bit_length() % 2]
            print(link, fit(part, FITTED[link]))
    report = {
        "sizes that set no constant": {system: errors(own) for system, own in held.items()},
        "all sizes from 64 KiB": {system: errors(own) for system, own in of.items()},
        "left out": {
            system: errors(own, FITTED["NVLink 4" if system == "a100_sxm" else "NVLink 3"])
            for system, own in of.items()
        },
        "by function": {
            function: errors(row for row in found if row[1] == function) for function in FUNCTIONS.values()
        },
        "own, 2 and 4 H200": errors(own_rows()),
    }
    print(json.dumps(report, indent=1))
    if options.record:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
