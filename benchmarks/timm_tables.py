"""Predict published times of timm models on consumer GPUs, and say how far off the predictions are.

The tables (huggingface/pytorch-image-models, ``results/benchmark-*.csv``) hold steps of one model after
another: forward passes, eager and compiled, and training steps with SGD, all under fp16 autocast with
``cudnn.benchmark`` on. They are not part of this project: ``--tables`` names a CSV of them with the columns
``file, mode, gpu, layout, compiled, model, img_size, batch_size, samples_per_sec``. Models are drawn at
random, each from another family, and every row of a drawn model in the newest file of its kind is predicted.

    PYTHONPATH=src python benchmarks/timm_tables.py --tables timm_steps.csv.gz --models 36

Captured steps are kept in ``--steps``, so that a changed cost model is tried again in seconds.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import pickle
import random
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common_spread import RESULTS, own_width_s

from tilefit.capture import capture
from tilefit.capture.torchvision_import import tolerated
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.cost.priced import priced, with_libraries
from tilefit.errors import TilefitError
from tilefit.ops import Step
from tilefit.options import StepOptions

with tolerated():
    import timm

#: Of each kind of table the newest of a GPU.
FILES = (
    "benchmark-infer-amp-nchw-pt240-cu124-rtx3090",
    "benchmark-infer-amp-nhwc-pt240-cu124-rtx3090",
    "benchmark-train-amp-nchw-pt112-cu113-rtx3090",
    "benchmark-train-amp-nhwc-pt112-cu113-rtx3090",
    "benchmark-infer-amp-nchw-pt291-cu128-4090",
    "benchmark-infer-amp-nchw-pt291-cu128-4090-dynamo",
    "benchmark-infer-amp-nhwc-pt240-cu124-rtx4090",
)


def rows(tables: Path) -> list[dict[str, str]]:
    """The rows of the files that count."""
    opened = gzip.open if tables.suffix == ".gz" else open
    with opened(tables, "rt") as file:
        return [row for row in csv.DictReader(file) if row["file"] in FILES and row["batch_size"]]


def family(model: str) -> str:
    """What models of one design have in common: the letters that their names begin with."""
    found = re.match(r"[a-z]+", model.replace("tf_", "").replace("legacy_", ""))
    return found[0] if found else model


def drawn(found: Iterable[dict[str, str]], count: int, seed: int) -> list[str]:
    """Models, each of another family as long as there are more, of those that are in most files."""
    known = set(timm.list_models())
    files: dict[str, set[str]] = defaultdict(set)
    for row in found:
        if row["model"].split(".")[0] in known:
            files[row["model"]].add(row["file"])
    families: dict[str, list[str]] = defaultdict(list)
    for model in sorted(files):
        families[family(model)].append(model)
    chance = random.Random(seed)
    order = []
    for name in sorted(families):
        models = families[name]
        most = max(len(files[model]) for model in models)
        order.append(chance.choice([model for model in models if len(files[model]) == most]))
    chance.shuffle(order)
    order.sort(key=lambda model: -len(files[model]))
    return order[:count]


def step_of(row: dict[str, str], folder: Path) -> Step | None:
    """The step of a row; None where it cannot be captured."""
    size, batch, train = int(row["img_size"]), int(float(row["batch_size"])), row["mode"] == "train"
    last = row["layout"] == "nhwc"
    fused = "-pt1" not in row["file"]  # no attention kernel before PyTorch 2.0
    path = (
        folder
        / f"{row['model']}-{size}-{batch}-{row['mode']}-{row['layout']}-{row['compiled']}-{fused}.pickle"
    )
    if path.is_file():
        step: Step = pickle.loads(path.read_bytes())  # which this script wrote
        return step
    options = StepOptions(
        train=train,
        amp="fp16",
        channels_last=last,
        # As timm makes it; several tensors in one kernel are the default since PyTorch 2.0.
        optimizer=partial(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True, foreach=fused),
        compile=row["compiled"] == "True",
    )
    timm.layers.set_fused_attn(fused)
    try:
        with torch.device("meta"):
            model = timm.create_model(row["model"].split(".")[0])
            images = torch.empty(batch, 3, size, size)
        step = capture(model.train(train), images, options=options)
    except (TilefitError, RuntimeError, TypeError, NotImplementedError) as error:
        print(f"{row['model']}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    path.write_bytes(pickle.dumps(step))
    return step


def predicted(row: dict[str, str], step: Step) -> dict[str, Any]:
    """A row with its prediction."""
    gpu = priced("rtx-" + row["gpu"].removeprefix("rtx"))
    if "-pt112-" in row["file"]:
        gpu = with_libraries(gpu, "cudnn=8.3")
    step = fuse(step) if row["compiled"] == "True" else step
    estimate, alone = estimate_step(step, gpu), estimate_step(step, gpu, launch_scale=0.0)
    measured_s = float(row["batch_size"]) / float(row["samples_per_sec"])
    kinds: dict[str, float] = defaultdict(float)
    for entry, each in zip(step.ops, estimate.ops, strict=False):
        kinds[entry.op.category] += each.time_s * 1e3
    return {
        "file": row["file"].removeprefix("benchmark-"),
        "model": row["model"],
        "size": int(row["img_size"]),
        "measured_ms": measured_s * 1e3,
        "predicted_ms": estimate.time_s * 1e3,
        "gpu_ms": alone.time_s * 1e3,
        "low_ms": estimate.low_s * 1e3,
        "high_ms": estimate.high_s * 1e3,
        "ratio": estimate.time_s / measured_s,
        "own": own_width_s(alone, gpu) / alone.time_s,
        "kinds_ms": {} if row["compiled"] == "True" else dict(kinds),
    }


def summary(found: list[dict[str, Any]]) -> Iterator[str]:
    """How far off the predictions are, by file."""
    for name in (*dict.fromkeys(row["file"] for row in found), ""):
        chosen = [row for row in found if row["file"] == name or not name]
        ratios = [row["ratio"] for row in chosen]
        within = sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in chosen)
        yield (
            f"{name or 'all':45} {len(chosen):4} rows: predicted over measured"
            f" {statistics.median(ratios):.2f}, error {statistics.median(abs(r - 1) for r in ratios):.1%},"
            f" worst {max(ratios, key=lambda r: abs(r - 1)):.2f},"
            f" in the interval {within / len(chosen):.0%}"
        )


def record(facts: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Keep a draw: its summary and, of each row that the GPU limits, the measured time over the predicted one
    and the half-width of the interval without what all operations share."""
    facts["rows"] = {
        name: [
            [round(1 / row["ratio"], 3), round(row["own"], 3)]
            for row in found
            if row["file"] == name and row["predicted_ms"] <= row["gpu_ms"]
        ]
        for name in dict.fromkeys(row["file"] for row in found)
    }
    path = RESULTS / "timm_tables.json"
    kept = json.loads(path.read_text())
    draws = {draw["seed"]: draw for draw in kept["draws"]}
    draws[facts["seed"]] = draws.get(facts["seed"], {}) | facts
    kept |= {"date": time.strftime("%Y-%m-%d"), "draws": [draws[seed] for seed in sorted(draws)]}
    text = json.dumps(kept, indent=1)
    path.write_text(re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=Path, default=Path("/tmp/timm_steps"), help="captured steps")
    parser.add_argument("--record", action="store_true", help="take the place of this seed in results/")
    args = parser.parse_args()
    args.steps.mkdir(parents=True, exist_ok=True)
    table = rows(args.tables)
    models = drawn(table, args.models, args.seed)
    found = []
    for number, model in enumerate(models):
        for row in table:
            if row["model"] == model and (step := step_of(row, args.steps)) is not None:
                found.append(predicted(row, step))
        print(f"{number + 1} of {len(models)}: {model}", file=sys.stderr)
    print("\n".join(summary(found)))
    if args.record:
        record({"seed": args.seed, "models": len(models), "summary": list(summary(found))}, found)


if __name__ == "__main__":
    main()
