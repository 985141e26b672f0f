"""How long ``tilefit sweep`` takes for 200 points of GPT-2, without a GPU.

Two grids: one over batch, width and GPU, one over batch, sequence and depth, which needs five times as many
captures for each GPU. Each runs in a process of its own with an empty store, then once more, when every point
is in it.

Run it with: python benchmarks/sweep_speed.py
It writes benchmarks/results/sweep_speed.json.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "sweep_speed.json"

GRIDS = {
    "batch x width x GPU": (
        *("--over", "batch=1..512", "--over", "hidden=576,768,960,1152,1536"),
        *("--over", "gpu=h200,a100-sxm-80gb,l40s,rtx-4090", "--seq", "1024"),
    ),
    "batch x sequence x depth": (
        *("--over", "batch=1..512", "--over", "seq=256,512,768,1024", "--over", "n_layer=6,12,18,24,36"),
        *("--gpu", "h200"),
    ),
}


def run(arguments: tuple[str, ...], store: Path) -> tuple[float, int]:
    """Wall seconds of one sweep, and how many points it has."""
    command = (
        sys.executable,
        "-m",
        "tilefit",
        "sweep",
        "hf:gpt2",
        "--amp",
        "bf16",
        "--output-format",
        "json",
    )
    start = time.perf_counter()
    done = subprocess.run(
        (*command, "--store", str(store), *arguments), capture_output=True, text=True, check=True
    )
    wall_s = time.perf_counter() - start
    points = json.loads(done.stdout)["points"]
    if any("error" in point for point in points):
        raise SystemExit(f"{' '.join(arguments)}: some points have no step")
    return wall_s, len(points)


def main() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in GRIDS.items():
            store = Path(folder) / f"{len(rows)}.db"
            (first_s, points), (again_s, _) = run(arguments, store), run(arguments, store)
            rows[name] = {"points": points, "first_s": round(first_s, 2), "from_store_s": round(again_s, 2)}
            print(f"{name}: {points} points in {first_s:.1f} s, from the store in {again_s:.1f} s")
    result = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "sweeps": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
