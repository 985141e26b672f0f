"""How long the command line takes, and how much memory, on this machine.

Each command runs several times in a process of its own, interleaved with the others; the median wall time is
recorded with the spread, and the largest resident memory of any of its processes.

Run it with: python benchmarks/check_speed.py
It writes benchmarks/results/check_speed.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "check_speed.json"
REPEATS = 5

#: The shape of Llama 2 70B (Touvron et al., 2023).
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def run(arguments: list[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of one ``tilefit`` command; its exit code must be 0 or 1."""
    start = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "tilefit", *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    # ru_maxrss of a waited-for process covers the children it waited for itself: the largest of them.
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"tilefit {' '.join(arguments)} failed")
    return wall_s, usage.ru_maxrss * 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "llama-70b.json"
        config.write_text(json.dumps(LLAMA_70B))
        training = ["--gpu", "h200", "--amp", "bf16", "--output-format", "json"]
        commands = {
            "help": ["--help"],
            "rule": ["rule", "ALN002"],
            "gpu": ["gpu", "h200"],
            "gpt2": ["check", "hf:gpt2", "--batch", "16", "--seq", "1024", *training],
            "llama-70b": ["check", f"hf:{config}", "--batch", "1", "--seq", "4096", *training],
        }
        for arguments in commands.values():
            run(arguments)  # file caches and byte code
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
        for _ in range(REPEATS):
            for name, arguments in commands.items():
                runs[name].append(run(arguments))
    results = {
        name: {
            "median_s": round(statistics.median(times), 3),
            "min_s": round(min(times), 3),
            "max_s": round(max(times), 3),
            "peak_resident_bytes": max(peak for _, peak in measured),
        }
        for name, measured in runs.items()
        for times in [[wall_s for wall_s, _ in measured]]
    }
    machine = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
    RESULT.write_text(
        json.dumps({"repeats": REPEATS, "machine": machine, "results": results}, indent=2) + "\n"
    )
    for name, result in results.items():
        peak = f"{result['peak_resident_bytes'] / 2**20:.0f} MiB"
        print(f"{name:10} {result['median_s']:6.2f} s, {result['min_s']} to {result['max_s']}, {peak}")


if __name__ == "__main__":
    main()
