"""Collect measured operations with several processes that share one GPU and never disturb each other.

    PYTHONPATH=src python benchmarks/collect_together.py --parts gemm:100 conv:160 --seed 9100 --out rows

A second of one process measures few shapes: building calls, cuDNN's choice of an algorithm and reading what
the profiler saw take the host longer than the kernels take the GPU. So each process draws shapes of its own
(``collect_h200.py``, seeds ``--seed``, ``--seed + 1`` and so on). Convolutions all run once at the same time;
then each process measures in its turn while the rest only read. A part is NAME:SECONDS.

At the end all measure the same few shapes, which shows how far a measurement repeats itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import collect_h200
import torch
from collect_h200 import PROFILED_PARTS, Case, Writer, batches, measure, provenance
from kernels import ClockLog, HostSession

from tilefit.cost.kernels import select
from tilefit.errors import TilefitError
from tilefit.gpus import get
from tilefit.measure.pool import Pool
from tilefit.measure.sessions import CudaSession
from tilefit.ops import Gemm
from tilefit.ops.dtypes import ALIGNMENT_BYTES

PARTS = PROFILED_PARTS
#: Of aligned products, which are measured well, this share is left out.
ALIGNED_LEFT_OUT = 0.5
REPEATED = {"gemm": 240, "conv": 120}


def drawn(part: str, seed: int, pool: Pool) -> Iterator[Case]:
    """A part's cases, fewer of them aligned products."""
    rng, gpu = Random(seed), get("h100-sxm")
    for case in PARTS[part](seed, pool):
        aligned = isinstance(case.op, Gemm) and select(case.op, gpu).alignment_bytes >= ALIGNMENT_BYTES
        if not aligned or rng.random() >= ALIGNED_LEFT_OUT:
            yield case


def rehearse(group: list[Case], pool: Pool) -> None:
    """Run each once: the library has then chosen its kernels."""
    for case in group:
        with suppress(RuntimeError, TilefitError, ValueError, TypeError):  # measuring it will report it
            case.build(pool)()
    if pool.device.type == "cuda":
        torch.cuda.synchronize()


def work(args: argparse.Namespace, number: int, turn: Any, together: Any, ended: Any) -> None:
    """One process."""
    torch.set_num_threads(1)
    collect_h200.WARM_CALLS, collect_h200.BATCH_SHAPES = 0, 200
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    pool = Pool(device, args.pool_bytes, args.seed + number)
    session = CudaSession if on_gpu else HostSession
    clocks = ClockLog()
    if on_gpu:
        clocks.start()
    lasting = [(name, float(seconds)) for name, _, seconds in (each.partition(":") for each in args.parts)]
    again = [(f"{name}-again", 1e9) for name, _ in lasting if name in REPEATED]
    for index, (part, budget_s) in enumerate(lasting + again, 1):
        name = part.removesuffix("-again")
        if part == name:
            cases = drawn(name, args.seed + number, pool)
        else:
            cases = itertools.islice(PARTS[name](args.seed - 1, pool), REPEATED[name])
        writer = Writer(args.out / f"{part}-{args.seed + number}.csv.gz")
        together.wait(100)
        began, rows, groups = time.monotonic(), 0, batches(cases)
        while True:
            now, group = time.monotonic(), next(groups, None)
            over = group is None or now - began > budget_s or now - args.began > args.most_s
            if name == "conv":  # whose first calls take long: all at once, and nobody measures
                if over:
                    ended.value = index
                together.wait(100)
                over = ended.value == index
                if not over:
                    rehearse(group or [], pool)
                    together.wait(100)
            if over or group is None:
                break
            try:
                found = list(measure(group, pool, session, clocks, turn))
            except TilefitError as error:  # the profiler lost records
                print(f"{number}: {error}", flush=True)
                continue
            writer.write(found)
            rows += len(found)
        print(f"{number}: {part} {rows} rows in {time.monotonic() - began:.0f} s", flush=True)
    if number == 0:
        (args.out / f"together-{args.seed}.json").write_text(json.dumps(provenance(device), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["gemm:100", "conv:160", "streaming:30"])
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=9100)
    parser.add_argument("--most-s", type=float, default=360.0, help="of all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool-bytes", type=int, default=1 << 30)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"KINETO_LOG_LEVEL": "5", "TEARDOWN_CUPTI": "0"}
    context = torch.multiprocessing.get_context("spawn")
    shared = context.Lock(), context.Barrier(args.processes), context.Value("i", 0)
    workers = [context.Process(target=work, args=(args, number, *shared)) for number in range(args.processes)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()


if __name__ == "__main__":
    main()
