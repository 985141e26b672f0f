"""How far off the times of collectives are, and the constants of links that they rest on.

    PYTHONPATH=src python benchmarks/collectives.py --tables nccl_collectives.csv.gz [--fit] [--record]

The tables (ai-dynamo/aiconfigurator, NCCL 2.23 to 2.29 on 2, 4 and 8 GPUs of one machine) are not part of
this project: a CSV with the columns ``system, op_name, num_gpus, bytes, nccl_dtype, t``. ``--fit`` fits the
constants of NVLink 4 to H100 and of NVLink 3 to A100, to the sizes that are even powers of two; the errors
are those of the odd ones. H200 sets no constant. ``left out`` prices a system with the constants of another
generation: A100 with those of H100, H100 and H200 with those of A100. The own measurements (2 H200, NVLink's
multicast off; ``several_gpus.py``) set no constant either.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from math import expm1
from pathlib import Path

from tilefit import gpus
from tilefit.cost.constants import FITTED_LINKS, LinkConstants, link_constants
from tilefit.measure.collectives import SMALLEST, Timed, fit

RESULTS = Path(__file__).parent / "results" / "collectives.json"
SYSTEMS = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm", "h200_sxm": "h200"}
FUNCTIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
#: Rows of ``several_gpus.py``.
OWN = RESULTS.with_name("several_gpus_h200.jsonl")


def rows(tables: Path) -> dict[str, list[Timed]]:
    """By system, a row for each function, number of GPUs, size and type: the median of the versions."""
    found: dict[tuple[str, str, int, int, bool], list[float]] = defaultdict(list)
    opened = gzip.open if tables.suffix == ".gz" else open
    with opened(tables, "rt") as file:
        for row in csv.DictReader(file):
            sizes = int(row["num_gpus"]), int(row["bytes"])
            key = row["system"], FUNCTIONS[row["op_name"]], *sizes, row["nccl_dtype"] == "half"
            found[key].append(float(row["t"]))
    made: dict[str, list[Timed]] = {system: [] for system in SYSTEMS}
    for (system, function, ranks, size, sums), times in found.items():
        made[system].append(Timed(function, ranks, size, statistics.median(times), sums))
    return made


def own_rows() -> list[Timed]:
    """The own measurements; without multicast nothing is summed up by the switch."""
    lines = map(json.loads, OWN.read_text().splitlines())
    own = [each for each in lines if each.pop("row") == "collective"]
    return [Timed(**each | {"sums": False}) for each in own]


def errors(system: str, chosen: Iterable[Timed], constants: LinkConstants | None = None) -> dict[str, float]:
    """Errors of the rows of at least 64 KiB."""
    gpu = gpus.get(SYSTEMS[system])
    chosen = [row for row in chosen if row.size_bytes >= SMALLEST]
    off = sorted(abs(expm1(row.off(gpu, constants or link_constants(gpu)))) for row in chosen)
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
    of = rows(options.tables)
    fitted = {system: [row for row in own if row.size_bytes.bit_length() % 2] for system, own in of.items()}
    if options.fit:
        for link, system in (("NVLink 3", "a100_sxm"), ("NVLink 4", "h100_sxm")):
            print(link, fit(fitted[system], gpus.get(SYSTEMS[system]), FITTED_LINKS[link]))
    other = {"a100_sxm": "NVLink 4", "h100_sxm": "NVLink 3", "h200_sxm": "NVLink 3"}
    h200 = own_rows()
    report = {
        "sizes that set no constant": {
            system: errors(system, [row for row in own if row not in fitted[system]])
            for system, own in of.items()
        },
        "all sizes from 64 KiB": {system: errors(system, own) for system, own in of.items()},
        "left out": {system: errors(system, own, FITTED_LINKS[other[system]]) for system, own in of.items()},
        "by function": {
            function: {
                system: errors(system, [row for row in own if row.function == function])
                for system, own in of.items()
            }
            for function in FUNCTIONS.values()
        },
        "own, 2 H200": errors("h200_sxm", h200),
        "own, by function": {
            function: errors("h200_sxm", [row for row in h200 if row.function == function])
            for function in {row.function: None for row in h200}
        },
    }
    print(json.dumps(report, indent=1))
    if options.record:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
