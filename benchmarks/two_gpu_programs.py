"""Training programs of two ranks, run as they are on two GPUs, beside what tilefit says of them without any.

    PYTHONPATH=src python benchmarks/two_gpu_programs.py --predict
    PYTHONPATH=src python benchmarks/two_gpu_programs.py --rows two_gpu_programs.jsonl --seconds 150
    PYTHONPATH=src python benchmarks/two_gpu_programs.py --rows two_gpu_programs.jsonl --compare

The first captures each program of ``programs/two_gpus`` by ``tilefit check --ranks 2`` for each rank and
needs no GPU. What it said before the programs were run is kept (``before`` in
``results/two_gpu_programs.json``), beside what it says ``now``. The second runs
them on GPUs of a machine: medians of steps back to back, the allocator's peak, and of a few profiled steps
how long kernels and messages take. ``--device cpu`` tries that with gloo at tiny sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from several_gpus import PROFILED, Rows, host, machine, summed
from torch.optim.optimizer import register_optimizer_step_post_hook

from tilefit.capture.torchvision_import import tolerated
from tilefit.errors import TilefitError
from tilefit.measure.launch import launch_scale
from tilefit.measure.ranks import Ranks

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs" / "two_gpus"
PREDICTED = HERE / "results" / "two_gpu_programs.json"
WARM, TIMED = 5, 10
#: Programs with their arguments, the most wanted first.
CASES = (
    "pipeline.py --schedule 1f1b",
    "pipeline.py --schedule gpipe",
    "pipeline.py --schedule interleaved",
    "replicas.py",
    "experts.py",
    "experts.py --dropless",
    "pipeline.py --schedule by-hand",
    "sharded.py",
    "sharded.py --split",
    "pipeline.py --schedule zero-bubble",
    "replicas.py --whole",
    "pipeline.py --schedule 1f1b --width 1024 --length 512 --parts 4",
    "experts.py --width 1024 --length 512 --experts 16",
    "pipeline.py --schedule interleaved --width 5120 --parts 4 --samples 2",
)
#: Of sizes that were predicted by plans before they were measured (``two_gpu_plans.py``), as ``UNEVEN``.
HELD = (
    "experts.py --width 4096 --length 1024 --experts 4",
    "experts.py --length 4096 --experts 16 --samples 2",
    "experts.py --width 3072 --length 1024 --experts 8 --samples 8 --layers 3",
)
UNEVEN = (
    "experts.py --dropless --width 3072 --length 1024 --experts 4",
    "experts.py --dropless --uneven --width 3072 --length 1024 --experts 4",
    "experts.py --dropless --uneven --length 4096 --samples 2",
)
LISTS = {"cases": CASES, "held": HELD, "uneven": UNEVEN}
TINY = "--width 512 --length 32 --samples 2 --layers 4"
#: What a program for GPUs is made into for a machine without.
_ON_CPU = {
    'torch.device("cuda", rank)': 'torch.device("cpu")',
    'torch.device("cuda", int(os.environ["LOCAL_RANK"]))': 'torch.device("cpu")',
    "torch.cuda.set_device(device)": "",
    'autocast("cuda"': 'autocast("cpu"',
    'mesh("cuda"': 'mesh("cpu"',
    "device_ids=[device.index]": "device_ids=None",
}


# ---- on the machine -------------------------------------------------------------------------------


class Marks:
    """What is read whenever a step of the first optimizer that makes one is over."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.count, self.first = cuda, 0, 0
        self.events: list[Any] = []
        self.profile: Any = None
        self.found: dict[str, Any] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.first = self.first or id(optimizer)
        if id(optimizer) != self.first:
            return
        self.count += 1
        if self.count == WARM and self.cuda:
            torch.cuda.reset_peak_memory_stats()
        if WARM <= self.count <= WARM + TIMED:
            self.events.append(self._mark())
        if self.count == WARM + TIMED:
            self._timed()
        if self.count == WARM + TIMED + PROFILED and self.profile is not None:
            torch.cuda.synchronize()
            self.profile.__exit__(None, None, None)
            self.found["profile"] = summed(self.profile.events())

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self) -> None:
        if not self.cuda:
            steps = [b - a for a, b in pairwise(self.events)]
            self.found |= {"median_s": statistics.median(steps), "peak_bytes": 1, "reserved_bytes": 1}
            return
        torch.cuda.synchronize()
        steps = [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.events)]
        self.found |= {
            "median_s": statistics.median(steps),
            "steps_s": steps,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.profile.__enter__()


def run(case: str, device: str) -> dict[str, Any]:
    """Run a program on this rank."""
    name, *arguments = case.split()
    arguments += ["--steps", str(WARM + TIMED + PROFILED)]
    cuda = device == "cuda"
    path = PROGRAMS / name
    if not cuda:
        arguments += TINY.split()
        text = path.read_text()
        for theirs, ours in _ON_CPU.items():
            text = text.replace(theirs, ours)
        path = Path(tempfile.mkdtemp()) / name
        path.write_text(text)
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    marks = Marks(cuda)
    hook = register_optimizer_step_post_hook(marks)
    try:
        # The processes have found each other.
        with (
            tolerated(),
            patch.object(dist, "init_process_group"),
            patch.object(dist, "destroy_process_group"),
            patch.object(sys, "argv", [str(path), *arguments]),
        ):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        hook.remove()
    return marks.found | {
        "launch_scale": launch_scale(torch.device("cuda", dist.get_rank())) if cuda else 1.0
    }


def measured(options: argparse.Namespace) -> None:
    """All programs that the time allows; after one that fails others go on in fresh processes."""
    rows, waiting = Rows(options.rows), list(LISTS[options.list])
    left = lambda: options.seconds - (time.monotonic() - rows.began_s)  # noqa: E731
    rows.write("machine", **machine(options.device))
    while waiting and left() > 20:
        try:
            with Ranks(2, options.device) as ranks:
                rows.write("host", launch_scales=ranks.call(host, options.device))
                while waiting and left() > 12:
                    case = waiting.pop(0)
                    limit_s = min(options.limit, left())
                    for rank, found in enumerate(ranks.call(run, case, options.device, timeout_s=limit_s)):
                        rows.write("program", name=case, rank=rank, **found)
        except TilefitError as error:
            rows.write("failed", error=str(error)[:900])
    rows.write("end", seconds=time.monotonic() - rows.began_s)


# ---- what is predicted ----------------------------------------------------------------------------


def predict(gpu: str) -> dict[str, Any]:
    """What ``tilefit check`` says of each program's two ranks."""
    made: dict[str, Any] = {}
    for case in CASES:
        made[case] = []
        for rank in range(2):
            name, *arguments = case.split()
            command = ["tilefit", "check", str(PROGRAMS / name), "--gpu", gpu, "--ranks", "2"]
            command = [sys.executable, "-m", *command, "--rank", str(rank), "--output-format", "json"]
            out = subprocess.run([*command, "--", *arguments], capture_output=True, text=True, check=False)
            if not out.stdout:
                raise SystemExit(out.stderr)
            found = json.loads(out.stdout)
            step, ranks = found["step"], found["program"]["ranks"]
            made[case].append(
                {
                    "time_s": round(step["time_s"], 6),
                    "compute_s": round(step["gpu_time_s"], 6),
                    "host_s": round(step["host_time_s"], 6),
                    "exposed_s": round(step["bounds_s"].get("communication", 0.0), 6),
                    "link_s": round(sum(each["time_s"] for each in ranks["exchanges"]), 6),
                    "late_s": round(ranks["late_s"], 6),
                    "peak_bytes": step["memory"]["peak_bytes"],
                }
            )
        print(case, made[case], file=sys.stderr, flush=True)
    return made


def compare(path: Path) -> None:
    """A line for each rank of each program, measured and predicted over measured, and the errors."""
    predicted = json.loads(PREDICTED.read_text())
    off: dict[str, list[float]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["row"] != "program":
            continue
        profile = row["profile"]
        measured_s = [row["median_s"], *(profile[key] / profile["steps"] for key in ("compute_s", "link_s"))]
        told = [f"{row['name']:70} {row['rank']}"]
        for when, every in predicted.items():
            said = every[row["name"]][row["rank"]]
            ratios = {
                "step": said["time_s"] / measured_s[0],
                "kernels": said["compute_s"] / measured_s[1],
                "memory": said["peak_bytes"] / row["peak_bytes"],
            }
            for key, ratio in ratios.items():
                off[f"{when}, {key}"].append(abs(ratio - 1))
            told.append(when + "".join(f" {ratio:5.2f}" for ratio in ratios.values()))
        steps = ", ".join(f"{1e3 * each:.1f}" for each in measured_s)
        print(f"{'  '.join(told)}  step, kernels, messages {steps} ms, {row['peak_bytes'] / 2**30:.2f} GiB")
    for key, each in off.items():
        print(f"{key}: median {statistics.median(each):.1%}, worst {max(each):.1%} of {len(each)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, help="written to, or compared")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which nothing more is begun")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds that a program may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", choices=LISTS, default="cases", help="which programs")
    parser.add_argument("--compare", action="store_true", help="with predictions; measures nothing")
    parser.add_argument("--predict", metavar="GPU", nargs="?", const="h100-sxm", help="write predictions")
    options = parser.parse_args()
    if options.predict:
        known = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
        known["now" if known else "before"] = predict(options.predict)
        PREDICTED.write_text(json.dumps(known, indent=1) + "\n")
    elif options.rows is None:
        parser.error("--rows is missing")
    elif options.compare:
        compare(options.rows)
    else:
        measured(options)


if __name__ == "__main__":
    main()
