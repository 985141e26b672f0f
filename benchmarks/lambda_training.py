"""Predict published training throughputs of ResNet-50 on GPUs of which nothing was fitted.

The table (lambdal/deeplearning-benchmark: NVIDIA's examples in containers of 2020 and 2022) is not part of
this project: ``--table`` names a CSV with the columns ``suite, gpu, num_gpu, task, precision, batch_per_gpu,
median``. Single GPUs, SGD, synthetic data. FP32 of the containers runs TF32 on Ampere and later. Prints, and
records in ``results/lambda_training.json``, predicted over measured times.

    PYTHONPATH=src python benchmarks/lambda_training.py --table lambda_training.csv.gz
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
from functools import cache
from pathlib import Path

import torch

from tilefit.capture import capture
from tilefit.capture.torchvision_import import tolerated
from tilefit.cost import estimate_step
from tilefit.cost.priced import priced
from tilefit.ops import Step
from tilefit.options import StepOptions

with tolerated():
    import torchvision

RESULT = Path(__file__).parent / "results" / "lambda_training.json"
#: The table's names; GPUs whose product is known.
GPUS = {
    "2080Ti": "rtx-2080-ti",
    "QuadroRTX6000": "quadro-rtx-6000",
    "V100_16GB": "v100-sxm2-16gb",
    "3090": "rtx-3090",
    "A10": "a10",
    "A40": "a40",
    "A4000": "rtx-a4000",
    "A6000": "rtx-a6000",
    "A100_PCIe": "a100-pcie-40gb",
    "A100_SXM4": "a100-sxm-40gb",
    "A100_40GB_SXM4": "a100-sxm-40gb",
    "A100_80GB_SXM4": "a100-sxm-80gb",
    "AdaA6000": "rtx-6000-ada",
    "H100_80GB_PCIe": "h100-pcie",
}
#: The batch whose time for an image counts for all: they are so large that it hardly changes.
BATCH = 128


@cache
def step(amp: bool, tf32: bool) -> Step:
    """A training step of ResNet-50, NCHW, as the containers' defaults have it."""
    options = StepOptions(train=True, amp="fp16" if amp else "", tf32=tf32, optimizer="sgd")
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        images = torch.empty(BATCH, 3, 224, 224)
    return capture(model.train(), images, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True)
    args = parser.parse_args()
    with gzip.open(args.table, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "resnet50" and row["num_gpu"] == "1"]
    found = []
    held = 0
    for row in rows:
        # FP16 casts the whole model by hand, which AMP stands for.
        if row["gpu"] not in GPUS or row["precision"] == "FP16":
            continue
        gpu = priced(GPUS[row["gpu"]])
        amp = row["precision"] == "AMP"
        taken = step(amp, not amp and gpu.supports("tf32"))
        estimate, measured_s = estimate_step(taken, gpu, launch_scale=0.0), BATCH / float(row["median"])
        ratio = estimate.time_s / measured_s
        held += estimate.low_s <= measured_s <= estimate.high_s
        found.append(
            {"suite": row["suite"], "gpu": gpu.name, "precision": row["precision"], "ratio": round(ratio, 3)}
        )
        print(f"{row['suite']} {gpu.name:18} {row['precision']:4} predicted over measured {ratio:.2f}")
    errors = [abs(each["ratio"] - 1) for each in found]
    print(f"{len(found)} rows: median {statistics.median(each['ratio'] for each in found):.2f},", end=" ")
    print(f"error {statistics.median(errors):.1%}, mean {statistics.fmean(errors):.1%},", end=" ")
    print(f"in the interval {held / len(found):.0%}")
    RESULT.write_text(
        json.dumps({"source": "lambdal/deeplearning-benchmark", "rows": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
