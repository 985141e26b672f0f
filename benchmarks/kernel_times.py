"""Kernels of single calls: their times, as PyTorch's profiler sees them, one row a case, and their prices."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tilefit.cost.model import estimate_all
from tilefit.cost.priced import resolve
from tilefit.ops import Op

CALLS = 3
#: Elements that are overwritten between calls: more than an L2 cache holds.
COLD_ELEMENTS = 1 << 26


class Timer:
    """Times calls on a GPU, or only runs them on a CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.type == "cuda"
        self._activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        self._cold = torch.zeros(COLD_ELEMENTS if on_gpu else 1024, device=self.device)

    def kernels(self, call: Callable[[], object]) -> dict[str, list[float]]:
        """By kernel: how often a call runs it, and the microseconds that this takes."""
        call()
        with profile(activities=[self._activity]) as seen:
            for _ in range(CALLS):
                torch.sinh(self._cold, out=self._cold)
                call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in seen.events() or ():
            if "sinh" not in event.name and event.device_type.name == "CUDA":
                each = sums[short(event.name)]
                each[0] += 1 / CALLS
                each[1] += event.device_time / CALLS
        return {name: [round(n, 2), round(us, 2)] for name, (n, us) in sums.items()}


def short(name: str) -> str:
    """A kernel's name without its template arguments."""
    if name.startswith("Mem"):
        return name.split(" (")[0]
    while "<" in name and (inner := re.sub(r"<[^<>]*>", "", name)) != name:
        name = inner
    return re.sub(r"\(anonymous namespace\)::|^void |\(.*$", "", name).split("::")[-1][:60]


Made = Callable[[torch.device], Callable[[], object]]
Cases = Callable[[int], Iterable[tuple[dict[str, Any], Made]]]


def run(
    description: str,
    cases: Cases,
    op_of: Callable[[dict[str, Any]], Op],
    kind: Callable[[dict[str, Any]], str],
) -> None:
    """A benchmark's command line.

    Args:
        description: What ``--help`` says.
        cases: Of the most elements of an operand: each case, and what makes its call on a device.
        op_of: What is priced.
        kind: What errors are told by.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--out", type=Path, help="append the rows that are measured here")
    parser.add_argument("--largest", type=int, default=1 << 28, help="most elements of an operand")
    parser.add_argument("--kernels", action="store_true", help="rows tell the kernels apart")
    parser.add_argument("--measured", type=Path, help="price these rows, without a GPU")
    parser.add_argument("--gpu", default="h200", help="the GPU of these rows")
    options = parser.parse_args()
    if options.measured:
        compare(options.measured, options.gpu, op_of, kind)
    elif options.out:
        measure(options, cases)
    else:
        parser.error("--out to measure, or --measured to compare")


def measure(options: argparse.Namespace, cases: Cases) -> None:
    """Append a row for each case for which there is time."""
    timer, began, count = Timer(), time.perf_counter(), 0
    with options.out.open("a") as file:
        if timer.device.type == "cuda":
            about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            about["cudnn"] = str(torch.backends.cudnn.version())
            file.write(json.dumps(about | {"date": time.strftime("%Y-%m-%d")}) + "\n")
        for case, made in cases(options.largest):
            if time.perf_counter() - began > options.seconds:
                break
            try:
                found = timer.kernels(made(timer.device))
                row: dict[str, Any] = {"us": round(sum(us for _, us in found.values()), 2)}
                row |= {"kernels": found} if options.kernels else {}
            except RuntimeError as error:
                row = {"error": str(error).splitlines()[0][:200]}
            file.write(json.dumps(case | row) + "\n")
            count += 1
    print(f"{count} cases in {time.perf_counter() - began:.0f} s")


def compare(
    measured: Path, gpu: str, op_of: Callable[[dict[str, Any]], Op], kind: Callable[[dict[str, Any]], str]
) -> None:
    """Print how far the prices are off."""
    opened = gzip.open if measured.suffix == ".gz" else open
    with opened(measured, "rt") as file:
        rows = [row for row in map(json.loads, file) if "us" in row]
    ratios: dict[str, list[float]] = defaultdict(list)
    for row, estimate in zip(rows, estimate_all(map(op_of, rows), resolve(gpu)[0]), strict=True):
        for name in (kind(row), "all"):
            ratios[name].append(estimate.time_s * 1e6 / row["us"])
    for name, each in sorted(ratios.items(), key=lambda item: (item[0] == "all", item[0])):
        errors = sorted(abs(ratio - 1) for ratio in each)
        print(
            f"{name:<26} {len(each):5} sizes: error {statistics.median(errors):6.1%} in the median, nine in "
            f"ten {errors[len(errors) * 9 // 10]:5.0%}; predicted over measured {statistics.median(each):.2f}"
        )
