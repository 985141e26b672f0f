"""How long the import of a large trace takes, and how much memory.

A training step of a transformer is profiled on the CPU with shapes and Python stacks, every operation gets a
launch and a kernel, as CUDA would have them, and the step is repeated until the file has the size asked for.
The import runs in a process of its own.

    PYTHONPATH=src:tests python benchmarks/trace_import.py --megabytes 300 \
        --out benchmarks/results/trace_import.json
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: What a process that imports a trace prints: seconds, and the most resident memory in KiB.
IMPORT = """
import resource, sys, time
start = time.perf_counter()
from tilefit.profiling import import_trace
report = import_trace(sys.argv[1], gpu="h200")
took = time.perf_counter() - start
run = report.measured
print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, run.steps, run.kernels,
      run.attributed_s / run.kernel_s, len(report.findings))
"""


def profiled_step(folder: Path) -> dict[str, Any]:
    """One step of a transformer as the profiler saw it, with pretended kernels."""
    import torch

    from pretend_gpu import pretend_file
    from tilefit.profiling.ranges import ModuleRanges

    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    inputs = torch.randn(2, 32, 64)

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    path = folder / "step.json"
    with (
        ModuleRanges().marking(),
        torch.profiler.profile(record_shapes=True, with_stack=True) as profiler,
        torch.profiler.record_function("ProfilerStep#0"),
    ):
        step()
    profiler.export_chrome_trace(str(path))
    return pretend_file(path)


def write_repeated(document: dict[str, Any], path: Path, size_bytes: int) -> int:
    """The step again and again, later each time, until the file has this size; returns how many steps."""
    events = document["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    length = max(event["ts"] + event["dur"] for event in spans) - min(event["ts"] for event in spans) + 100
    steps = 0
    with path.open("w") as file:
        header = {name: value for name, value in document.items() if name != "traceEvents"}
        file.write(json.dumps(header)[:-1] + ',\n"traceEvents": [\n')
        while file.tell() < size_bytes:
            lines = []
            for event in events:
                args = dict(event.get("args", {}))
                for name, stride in (
                    ("correlation", 10**6),
                    ("External id", 10**6),
                    ("Sequence number", 10**5),
                ):
                    if args.get(name, -1) > 0:
                        args[name] += steps * stride
                moved = {**event, "ts": event.get("ts", 0) + steps * length, "args": args}
                if event["name"] == "ProfilerStep#0":
                    moved["name"] = f"ProfilerStep#{steps}"
                lines.append(json.dumps(moved, indent=2))
            file.write((",\n" if steps else "") + ",\n".join(lines))
            steps += 1
        file.write("\n]}\n")
    return steps


def imported(path: Path) -> dict[str, float]:
    """What importing a trace takes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", IMPORT, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if run.returncode:
        sys.exit(run.stderr)
    took, memory, steps, kernels, attributed, findings = run.stdout.split()
    return {
        "seconds": float(took),
        "peak_gib": float(memory) / 2**20,
        "steps": int(steps),
        "kernels_per_step": int(kernels),
        "attributed": float(attributed),
        "findings": int(findings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--gzip", action="store_true", help="the same trace compressed as well")
    parser.add_argument("--keep", type=Path, help="write the trace here, and leave it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "trace.json"
        start = time.perf_counter()
        document = profiled_step(Path(folder))
        steps = write_repeated(document, path, int(options.megabytes * 1e6))
        print(
            f"wrote {path.stat().st_size / 1e6:.0f} MB in {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
        )
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "megabytes": path.stat().st_size / 1e6,
            "events": steps * len(document["traceEvents"]),
            "plain": imported(path),
        }
        if options.gzip:
            compressed = Path(folder) / "trace.json.gz"
            with gzip.open(compressed, "wb", compresslevel=5) as file:
                file.write(path.read_bytes())
            result["compressed_megabytes"] = compressed.stat().st_size / 1e6
            result["gzip"] = imported(compressed)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
