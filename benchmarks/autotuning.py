"""What cuDNN's autotuning buys: convolutions that were collected with it and without it.

    PYTHONPATH=src python benchmarks/autotuning.py --data DIR

DIR holds the files of ``collect_h200.py --part conv``, which measures part of its shapes both ways. Writes
benchmarks/results/autotuning_h200.json.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "autotuning_h200.json"
SHAPE = (
    "batch", "in_channels", "out_channels", "input_size", "kernel_size", "stride", "padding", "dilation",
    "groups", "dtype", "channels_last", "direction",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    found: dict[tuple[str, ...], dict[bool, float]] = {}
    for path in sorted(parser.parse_args().data.glob("conv-*.csv.gz")):
        with gzip.open(path, "rt") as file:
            for row in csv.DictReader(file):
                if row["us"] and not row["error"]:
                    times = found.setdefault(tuple(row[name] for name in SHAPE), {})
                    times[row["name"] == "tuned"] = float(row["us"])
    rows = [
        {**dict(zip(SHAPE, shape, strict=True)), "default_us": times[False], "tuned_us": times[True]}
        for shape, times in found.items()
        if len(times) == 2
    ]
    gains = sorted(row["default_us"] / row["tuned_us"] for row in rows)  # type: ignore[operator]
    tenth = len(gains) // 10
    summary = {
        "passes": len(rows),
        "p10": gains[tenth],
        "median": statistics.median(gains),
        "p90": gains[-tenth],
    }
    print(", ".join(f"{name} {value:.3f}" for name, value in summary.items()))
    RESULT.write_text(json.dumps({"default_over_tuned": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
