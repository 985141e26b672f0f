"""Is the batch that a few measurements find as good as the best of all? On a GPU, for four models.

The search (:func:`tilefit.sweep.best.best_batch`) measures six batches at most. Then every batch that it
could have chosen, down to an eighth of the largest that was tried, is measured once more. What is
compared is the throughput of the batch that was found with the highest of all, both from that second pass.
The memory is limited, so that it takes two minutes; a batch that needs more runs out of memory as on a
smaller GPU.

    PYTHONPATH=src python benchmarks/best_batch.py --out benchmarks/results/best_batch_h200.json

A dry run without a GPU, with tiny models: --device cpu.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from tilefit import gpus
from tilefit.capture.child import capture_target
from tilefit.cost.footprint import USABLE_SHARE
from tilefit.errors import TilefitError
from tilefit.ops import Step
from tilefit.options import TargetOptions
from tilefit.sweep.axes import Axis
from tilefit.sweep.best import MOST_MEASUREMENTS, Trial, batches, best_batch
from tilefit.sweep.meter import Meter
from tilefit.sweep.run import Grid, Predictions

MODELS: list[tuple[str, TargetOptions]] = [
    ("hf:gpt2", TargetOptions(seq=512, amp="bf16")),
    ("torchvision:resnet50", TargetOptions(amp="bf16", channels_last=True)),
    ("hf:bert", TargetOptions(seq=256, amp="bf16", fused_optimizer=True)),
    ("hf:vit", TargetOptions(amp="bf16", train=False)),
]
#: The same kinds of models for a dry run.
TINY: list[tuple[str, TargetOptions]] = [
    ("hf:gpt2", TargetOptions(seq=16, arguments={"n_layer": 1, "n_embd": 48, "vocab_size": 128})),
    (
        "hf:bert",
        TargetOptions(seq=16, train=False, arguments={"num_hidden_layers": 1, "hidden_size": 48}),
    ),
]
#: Batches down to this share of the largest that was tried are measured: a smaller one would have to beat it
#: by keeping the GPU busier with an eighth of the work.
_SMALLEST = 1 / 8


def captures(
    target: str, options: Sequence[TargetOptions], timeout_s: float
) -> Generator[Step | TilefitError]:
    """Captures in this process, which has PyTorch and the libraries loaded anyway."""
    for each in options:
        try:
            yield capture_target(target, each)
        except TilefitError as error:
            yield error


def rates(trials: Sequence[Trial]) -> dict[int, float]:
    return {trial.batch: round(trial.samples_per_s, 2) for trial in trials}


def run(
    target: str, options: TargetOptions, device: torch.device, limit_bytes: int, gpu: str, most: int
) -> Any:
    start = time.perf_counter()
    grid = Grid(target, options, (Axis("batch", batches(most)),), (gpus.get(gpu),))
    predicted = list(Predictions(grid, 60.0, capture=captures))
    prediction_s = time.perf_counter() - start
    meter = Meter(target, options, device)
    start = time.perf_counter()
    found = best_batch(predicted, USABLE_SHARE * limit_bytes, meter)
    search_s = time.perf_counter() - start
    if found.best is None:
        return {"failure": "no batch fits"}
    tried = max(trial.batch for trial in found.trials)
    start = time.perf_counter()
    every: list[Trial] = []
    for batch in sorted(point.samples for point in predicted):
        if batch < _SMALLEST * tried:
            continue
        trial = meter(batch)
        if trial is None or (device.type == "cpu" and batch > tried):
            break
        every.append(trial)
    best = max(every, key=lambda trial: trial.samples_per_s)
    chosen = next((trial for trial in every if trial.batch == found.best.batch), found.best)
    return {
        "found": chosen.batch,
        "best": best.batch,
        "loss": round(1 - chosen.samples_per_s / best.samples_per_s, 4),
        "measurements": found.measurements,
        "out_of_memory": found.too_large,
        "search": rates(found.trials),
        "exhaustive": rates(every),
        "predicted": {p.samples: round(p.items_per_s, 2) for p in predicted if p.samples <= 2 * tried},
        "memory_measured_bytes": {trial.batch: trial.memory_bytes for trial in found.trials},
        "memory_predicted_bytes": {
            p.samples: p.memory_bytes for p in predicted if p.samples in rates(found.trials)
        },
        "prediction_s": round(prediction_s, 1),
        "search_s": round(search_s, 1),
        "exhaustive_s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", default="h200", help="predictions are for this one")
    parser.add_argument("--memory-gib", type=float, default=24.0, help="memory that steps may take")
    parser.add_argument(
        "--budget-s", type=float, default=110.0, help="start no further model after this time"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("This measures on a GPU, and PyTorch finds none here: --device cpu is a dry run.")
        limit_bytes = int(arguments.memory_gib * 2**30)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
        models, most = MODELS, 4096
    else:
        limit_bytes = 2**30
        models, most = TINY, 24
    rows = []
    start = time.perf_counter()
    for target, options in models:
        if time.perf_counter() - start > arguments.budget_s:
            print(f"{target}: no time left", file=sys.stderr)
            continue
        row = run(target, options, device, limit_bytes, arguments.gpu, most)
        rows.append({"model": target, "train": options.train, **row})
        print(
            json.dumps({key: row.get(key) for key in ("found", "best", "loss", "measurements", "search_s")})
        )
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "memory_limit_bytes": limit_bytes,
        "most_measurements": MOST_MEASUREMENTS,
        "worst_loss": max((row["loss"] for row in rows if "loss" in row), default=None),
        "wall_s": round(time.perf_counter() - start, 1),
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"worst loss {result['worst_loss']}, {result['wall_s']} s")


if __name__ == "__main__":
    main()
