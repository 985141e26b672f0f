"""Operations that ``tilefit calibrate`` measured, kept, and how far prices are off them.

    PYTHONPATH=src python benchmarks/calibrated_operations.py --record rows.jsonl.gz full.npz --minutes 4
    PYTHONPATH=src python benchmarks/calibrated_operations.py --measured rows.jsonl.gz --gpu h100-sxm \
        --calibrations full.npz

The first, on a GPU, is the command itself, with options of it, and keeps each operation with its time. The
second prices what is held out of them, of each kind evenly spaced ones, as if nobody had measured the GPU, by
what ships and by calibrations.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tilefit.cli import main as tilefit
from tilefit.cost.kernels import select
from tilefit.cost.model import by_stages
from tilefit.cost.priced import as_shipped, left_out, priced
from tilefit.cost.streaming import traffic
from tilefit.gpus import get
from tilefit.measure import sessions
from tilefit.measure.calibration import as_captured, held_out
from tilefit.ops import Attention, Conv, Gemm, Op
from tilefit.ops.dtypes import ALIGNMENT_BYTES

KINDS: dict[str, type[Op]] = {"gemm": Gemm, "conv": Conv, "attention": Attention}


def record(rows: Path, calibration: Path, options: Sequence[str]) -> None:
    """Calibrate, and keep what was measured."""
    measured = sessions.kernel_times
    with gzip.open(rows, "wt") as file:

        def kept(factories: Sequence[Callable[[], Any]], session: sessions.Session) -> list[float | None]:
            times_s = measured(factories, session)
            for factory, time_s in zip(factories, times_s, strict=True):
                made, *_ = arguments = factory.args  # type: ignore[attr-defined]
                case = (
                    {"kind": made.kind, **asdict(made)}
                    if isinstance(made, Op)
                    else {"kind": "streaming", "case": arguments[:4]}
                )
                if time_s is not None:
                    file.write(json.dumps(case | {"s": round(time_s, 9)}) + "\n")
            return times_s

        sessions.kernel_times = kept
        tilefit(["calibrate", "--output", str(calibration), *options])


def read(path: Path) -> Iterator[tuple[Op, float]]:
    """What was measured, with its time in seconds."""
    with gzip.open(path, "rt") as file:
        for row in map(json.loads, file):
            kind, time_s = row.pop("kind"), row.pop("s")
            if kind == "streaming":
                op: Op | None = as_captured(*row["case"])
            else:
                op = KINDS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
            if op is not None:
                yield op, time_s


def group(op: Op, gpu: Any) -> str:
    """What errors are told by."""
    if not isinstance(op, Gemm):
        return op.kind
    if op.dtype not in ("bf16", "fp16"):
        return "gemm, other types"
    return f"gemm, {'' if select(op, gpu).alignment_bytes >= ALIGNMENT_BYTES else 'mis'}aligned"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, nargs=2, help="rows, and the calibration, to be written")
    parser.add_argument("--measured", type=Path, help="rows to be priced")
    parser.add_argument("--gpu", help="of these")
    parser.add_argument("--calibrations", type=Path, nargs="+", default=[])
    parser.add_argument("--most", type=int, default=1000, help="of a kind that are priced")
    options, others = parser.parse_known_args()
    if options.record:
        record(*options.record, others)
        return
    gpu = get(options.gpu)
    devices = {"nothing": left_out(gpu), "ships": as_shipped(gpu)}
    devices |= {path.stem: priced(gpu, path) for path in options.calibrations}
    kinds: dict[str, list[tuple[Op, float]]] = defaultdict(list)
    for op, time_s in read(options.measured):
        if held_out(op):
            kinds[op.kind].append((op, time_s))
    for rows in kinds.values():
        chosen = rows[:: max(1, len(rows) // options.most)]
        groups = [group(op, gpu) for op, _ in chosen]
        for name, device in devices.items():
            found = by_stages([traffic(op) for op, _ in chosen], device)
            ratios = [each.time_s / time_s for each, (_, time_s) in zip(found, chosen, strict=True)]
            for part in dict.fromkeys(groups):
                of_part = [ratio for ratio, each in zip(ratios, groups, strict=True) if each == part]
                error = fmean(abs(ratio - 1) for ratio in of_part)
                print(
                    f"{part:20} {name:10} {len(of_part):5} held out: error {error:6.1%}; "
                    f"predicted over measured {median(of_part):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
