"""What PyTorch's default loses to the best way of computing a product, of all that can be tried here.

    PYTHONPATH=src python benchmarks/gemm_choice.py --out benchmarks/results/gemm_choice_h200.json

The 160 products of DeepBench's training list, and products with few rows or odd sizes from language models'
layers, in bf16. For each: ``torch.mm``, the same with cuBLAS and with cuBLASLt preferred, the algorithms that
cuBLASLt's heuristics propose, a plain Triton kernel with a few tile sizes, and for at most 16 rows one that
splits the contraction. Every result is compared with the product in fp32. All ways are timed roughly, then
the default and the three fastest again, in turn (:mod:`tilefit.measure.choice`): median, 20th and 80th
percentile of the replays of CUDA graphs in microseconds, random normal operands that are **cold in L2**.

Small products first; what the time budget does not reach is left out, and the result says how many.
Sizes are DeepBench's, column-major: weight m x k, mini-batch n.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from collect_h200 import provenance
from kernels import ClockLog

from tilefit.errors import TilefitError
from tilefit.measure import timer
from tilefit.measure.choice import Choice, choose
from tilefit.measure.pool import Pool
from tilefit.measure.run import pool_for
from tilefit.measure.suites import deepbench_gemm
from tilefit.ops import Gemm

#: Outputs x inputs of layers of public models (GPT-2, BERT, Llama 2 and 3, Mixtral), and what becomes of them
#: when a vocabulary or a width is odd.
FEW_ROWS = ((768, 768), (3072, 768), (4096, 4096), (11008, 4096), (4096, 11008), (1024, 4096), (14336, 4096))
ROWS = (1, 2, 4, 7, 8, 16)
ODD = (
    *((50257, 768, n) for n in (1, 16, 256, 4096)),
    *((32001, 4096, n) for n in (1, 16, 256)),
    *((4095, 4096, n) for n in (1, 16, 250, 4096)),
    *((4096, 4095, n) for n in (1, 16, 250)),
    *((1000, 2048, n) for n in (1, 32, 255)),
    *((2, 768, n) for n in (1, 32, 4096)),
)
REPLAYS = 9


@dataclass(frozen=True)
class Case:
    """A product and the list it is from."""

    gemm: Gemm
    source: str


def cases() -> list[Case]:
    """Everything to be measured, small products first."""
    few = [Case(Gemm(n, m, k), "few rows") for m, k in FEW_ROWS for n in ROWS]
    odd = [Case(Gemm(n, m, k), "odd") for m, k, n in ODD]
    listed = [Case(replace(entry.op, dtype="bf16"), "deepbench") for entry in deepbench_gemm()]
    return sorted([*few, *odd, *listed], key=lambda case: case.gemm.flop)


def row(case: Case, choice: Choice) -> dict[str, Any]:
    """What is recorded of one product."""
    return {
        **_size(case),
        "best": choice.best,
        "regret": round(choice.regret, 4),
        "noise": choice.is_noise,
        "us": {
            name: [_us(seconds) for seconds in (timing.median_s, timing.low_s, timing.high_s)]
            for name, timing in choice.final.items()
        },
        "rough_us": {name: _us(seconds) for name, seconds in choice.rough_s.items()},
        "errors": choice.errors,
    }


def _size(case: Case) -> dict[str, Any]:
    op = case.gemm
    return {"source": case.source, "m": op.n, "n": op.m, "k": op.k, "layout": op.layout}


def _us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.4g}")


def measure(
    todo: Iterable[Case], pool: Pool, device: timer.Device, deadline_s: float
) -> Iterator[dict[str, Any]]:
    """A row for each product until the time is up."""
    for case in todo:
        if time.monotonic() > deadline_s:
            return
        try:
            yield row(case, choose(case.gemm, pool, device, replays=REPLAYS))
        except TilefitError as error:
            yield _size(case) | {"failed": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=120)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, default=0, help="so many products at most, the smallest")
    args = parser.parse_args()
    began = time.monotonic()
    place = torch.device(args.device)
    device: timer.Device = timer.CudaDevice() if place.type == "cuda" else timer.HostDevice()
    clocks = ClockLog()
    clocks.start()
    todo = cases()[: args.limit or None]
    facts = provenance(place) | {"triton": _version("triton"), "replays": REPLAYS}
    rows: list[dict[str, Any]] = []
    for each in measure(todo, pool_for(place), device, began + args.budget_s):
        rows.append(each)
        if len(rows) % 20 == 0 or len(rows) == len(todo):
            print(f"{len(rows)} of {len(todo)} products, {time.monotonic() - began:.0f} s", flush=True)
            _write(args.out, facts, clocks, len(todo), rows)
    _write(args.out, facts, clocks, len(todo), rows)
    failed = sum(bool(each.get("errors") or each.get("failed")) for each in rows)
    print(f"{len(rows)} of {len(todo)} products measured; at {failed} of them a way failed: {args.out}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write(
    path: Path, facts: dict[str, Any], clocks: ClockLog, wanted: int, rows: list[dict[str, Any]]
) -> None:
    """JSON with a line for each product."""
    mhz = sorted(sample.sm_mhz for sample in list(clocks.samples))
    about = facts | {"wanted": wanted, "sm_mhz": [mhz[0], mhz[len(mhz) // 2], mhz[-1]] if mhz else None}
    lines = ",\n".join(json.dumps(each) for each in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n"provenance": {json.dumps(about)},\n"choices": [\n{lines}\n]\n}}\n')


if __name__ == "__main__":
    main()
