"""Times of the kernels of single calls, as PyTorch's profiler sees them; one row a case, in JSON lines."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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


def run(
    description: str, cases: Callable[[int], Iterable[tuple[dict[str, Any], Callable[..., Any]]]]
) -> None:
    """A benchmark's command line: ``cases(largest)`` gives each case and what makes its call on a device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--largest", type=int, default=1 << 28, help="most elements of an operand")
    options = parser.parse_args()
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
                row = {"us": round(sum(us for _, us in found.values()), 2), "kernels": found}
            except RuntimeError as error:
                row = {"error": str(error).splitlines()[0][:200]}
            file.write(json.dumps(case | row) + "\n")
            count += 1
    print(f"{count} cases in {time.perf_counter() - began:.0f} s")
