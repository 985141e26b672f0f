"""Calibration without a GPU: ``tilefit calibrate`` on operations that were measured before.

    PYTHONPATH=src python benchmarks/calibrate_offline.py --h200 results/h200 --tables data

Plays :func:`tilefit.measure.calibration.calibrate` with rows of a collection as candidates and their recorded
times as measurements, and states the error against the number of operations measured, on a test set that the
calibration never sees, not even as its own held-out operations: the families of shapes that
``pack_h200.py`` holds out. Nothing of what ships is used, and the constants start from those of a
GPU of another architecture, so that nothing of this GPU was known before. The same for the published bf16
tables of other GPUs, from 100 rows each, where the test set is what was neither measured nor drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import public_tables
import torch
from fit_calibration import READERS
from pack_h200 import HELD_OUT
from pack_h200 import family as packed_family
from pack_h200 import rows as collected

from tilefit import gpus
from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import Calibration
from tilefit.cost.constants import Constants, constants
from tilefit.gpus import Gpu
from tilefit.measure.calibration import Candidate, Design, calibrate
from tilefit.ops import Op

RESULT = Path(__file__).parent / "results" / "calibrate_offline.json"
NUMBERS = {
    "gemm": (500, 1000, 2000, 4000, 8000),
    "streaming": (500, 1000, 2000),
    "conv": (500, 1000, 2000),
    "attention": (300, 600, 1200),
}
#: Whose constants a published table's GPU starts from.
OTHERS = {"a100-sxm-80gb": "h100", "h100-sxm": "a100", "h200": "a100", "l40s": "a100"}
MOST_TESTED = 6000
MEASURING = 0.8  # of the budget; each measurement takes a second of a made-up clock


@dataclass
class Recorded:
    """Plays measurements."""

    times_s: dict[Op, float]
    now_s: float = 0.0

    def __call__(self, few: Sequence[Candidate]) -> list[float | None]:
        self.now_s += len(few)
        return [self.times_s[each.op] for each in few]

    def clock(self) -> float:
        return self.now_s


def play(
    gpu: Gpu, kind: str, pool: dict[Op, float], number: int, start: Constants, seed: int = 0
) -> tuple[Calibration, list[Op]]:
    """A calibration after so many measurements, and what was measured or drawn."""
    order = list(pool)
    Random(seed).shuffle(order)
    seen: list[Op] = []

    def drawn() -> Iterator[Candidate]:
        for op in order:
            seen.append(op)
            yield Candidate(op, lambda _: lambda: None)

    bench = Recorded(pool)
    own = calibrate(
        gpu,
        bench,
        Design(
            budget_s=number / MEASURING,
            drawn={kind: drawn()},
            shares={kind: 1.0},
            start=start,
            clock=bench.clock,
        ),
    )
    return own, seen


def score(gpu: Gpu, own: Calibration, test: dict[Op, float], start: Constants) -> dict[str, float]:
    """Errors in per cent, and the share of times inside the interval."""
    ops = [op for op in test if own.covers(op)]
    times = np.array([test[op] for op in ops])
    first = [analytic(op, gpu, own.constants) for op in ops]
    second = own.correct(ops, gpu, first)
    before = np.array([analytic(op, gpu, start).time_s for op in ops])
    inside = [e.low_s <= t <= e.high_s for e, t in zip(second, times, strict=True)]

    def mape(predicted: Sequence[float] | Any) -> float:
        return round(float(100 * np.abs(np.array(predicted) / times - 1).mean()), 2)

    result = {
        "tested": len(ops),
        "before": mape(before),
        "constants": mape([e.time_s for e in first]),
        "calibrated": mape([e.time_s for e in second]),
        "inside": round(100 * float(np.mean(inside)), 1),
    }
    plain = [i for i, op in enumerate(ops) if op.dtype in ("bf16", "fp16")]
    predicted = np.array([e.time_s for e in second])
    result["calibrated_16_bits"] = round(float(100 * np.abs(predicted / times - 1)[plain].mean()), 2)
    return result


def h200(folder: Path, show: Callable[[str, dict[str, float]], None], kinds: Sequence[str]) -> None:
    gpu = gpus.get("h200")
    start = constants(gpus.get("a100"))
    divisor, remainder = HELD_OUT
    for kind in kinds:
        pool: dict[Op, float] = {}
        test: dict[Op, float] = {}
        rows = [row for row in collected([folder], kind) if row.get("name") != "tuned"]
        Random(0).shuffle(rows)
        for row in rows:
            if len(pool) > 60_000:
                break
            op = READERS[kind](row)
            if op is not None:
                aside = crc32(packed_family(kind, row).encode()) % divisor == remainder
                (test if aside else pool)[op] = float(row["us"]) * 1e-6
        test = dict(islice(test.items(), MOST_TESTED))
        for number in NUMBERS[kind]:
            fitted, _ = play(gpu, kind, pool, number, start)
            own = fitted.about["networks"][kind]["errors"]["calibrated"]
            show(
                f"h200 {kind}, {number} measured",
                score(gpu, fitted, test, start) | {"own_estimate": round(100 * own, 2)},
            )


def tables(folder: Path, show: Callable[[str, dict[str, float]], None]) -> None:
    for name in public_tables.BF16:
        gpu = gpus.get(name)
        rows = public_tables.bf16_table(folder, name)
        Random(1).shuffle(rows)
        found = {row.gemm: row.time_s for row in rows}
        start = constants(gpus.get(OTHERS[name]))
        for number in (100, 200, 400):
            fitted, seen = play(gpu, "gemm", found, number, start)
            rest = found.copy()
            for op in seen:
                del rest[op]
            test = dict(islice(rest.items(), MOST_TESTED))
            show(f"{name} table, {number} measured", score(gpu, fitted, test, start))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--h200", type=Path, help="folder of collect_h200.py's files")
    parser.add_argument("--tables", type=Path, help="folder of the published tables")
    parser.add_argument("--kinds", nargs="*", default=list(NUMBERS), choices=list(NUMBERS))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, dict[str, float]] = json.loads(RESULT.read_text()) if RESULT.exists() else {}

    def show(label: str, values: dict[str, float]) -> None:
        results[label] = values
        print(f"{label:34}", "  ".join(f"{k} {v:g}" for k, v in values.items()), flush=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")

    if args.h200:
        h200(args.h200, show, args.kinds)
    if args.tables:
        tables(args.tables, show)


if __name__ == "__main__":
    main()
