"""What biases of convolutions take on a GPU: the kernel that adds one, and the sum that is its gradient.

    PYTHONPATH=src python benchmarks/conv_bias.py --out benchmarks/results/conv_bias_h100.jsonl.gz
    PYTHONPATH=src python benchmarks/conv_bias.py --measured benchmarks/results/conv_bias_h100.jsonl.gz

Sizes are drawn at random, none of them set a constant of the model. Of each the profiler's times of single
kernels count, the shortest of some passes; a batch norm in evaluation follows.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tilefit import gpus
from tilefit.cost import estimate
from tilefit.cost.priced import left_out
from tilefit.ops import Conv2d, Streaming

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PASSES = 3
MOST_ELEMENTS = 60_000_000


def drawn(seed: int) -> Iterator[dict[str, Any]]:
    """Sizes of convolutions with a bias."""
    chance = random.Random(seed)
    while True:
        channels = chance.choice([chance.randrange(3, 300), 8 * chance.randrange(1, 65)])
        case = {
            "batch": chance.choice([1, 2, 8, 16, 32, 64, 128]),
            "channels": channels,
            "size": chance.choice([1, 7, 8, 14, 16, 28, 32, 56, 64, 112]),
            "kernel": chance.choice([1, 3]),
            "dtype": chance.choice([*DTYPES]),
            "channels_last": chance.random() < 0.5,
        }
        if case["batch"] * channels * case["size"] ** 2 <= MOST_ELEMENTS:
            yield case


def kernels_us(run: Any) -> dict[str, float]:
    """Of every kernel of a call, by name, its time in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] += event.time_range.elapsed_us()
    return found


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """A case with its times [us]."""
    dtype, channels = DTYPES[case["dtype"]], case["channels"]
    layout = torch.channels_last if case["channels_last"] else torch.contiguous_format
    conv = nn.Conv2d(channels, channels, case["kernel"], padding=case["kernel"] // 2)
    norm = nn.BatchNorm2d(channels).eval()
    conv, norm = (each.to("cuda", dtype, memory_format=layout) for each in (conv, norm))
    x = torch.randn(case["batch"], channels, case["size"], case["size"], device="cuda", dtype=dtype)
    x = x.contiguous(memory_format=layout).requires_grad_()

    def run() -> None:
        x.grad = None  # else gradients are added up, by kernels of the same name
        conv.zero_grad()
        y = conv(x)
        y.backward(y.detach())
        with torch.no_grad():
            norm(y)

    run()
    times = [kernels_us(run) for _ in range(PASSES)]
    least = {name: min(each.get(name, 0.0) for each in times) for name in times[-1]}
    parts = {"add": "CUDAFunctor_add", "sum": "reduce_kernel", "invstd": "invstd", "copy": "Memcpy DtoD"}
    counts = [k for k in least if "reduce_kernel" in k]
    told = {part: round(sum(v for k, v in least.items() if text in k), 2) for part, text in parts.items()}
    norms = [v for k, v in least.items() if "transform_input" in k or "bn_fw" in k]
    return {
        **case,
        **told,
        "sums": len(counts),
        "norm": round(sum(norms), 2),
        "all": round(sum(least.values()), 2),
    }


def predict(path: Path, name: str) -> None:
    """How far off the model is, as if the GPU were not measured."""
    gpu = left_out(gpus.get(name))
    ratios: dict[str, list[float]] = defaultdict(list)
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        row = json.loads(line)
        if "channels" not in row:
            continue
        channels, size, elements = (
            row["channels"],
            row["size"],
            row["batch"] * row["channels"] * row["size"] ** 2,
        )
        op = Conv2d(
            row["batch"], channels, channels, size, row["kernel"], padding=row["kernel"] // 2,
            dtype=row["dtype"], channels_last=row["channels_last"], bias=True,
        )  # fmt: skip
        added_s = estimate(op, gpu).time_s - estimate(replace(op, bias=False), gpu).time_s
        width = {"bf16": 2, "fp16": 2, "fp32": 4}[row["dtype"]]
        total = Streaming(
            "reduction",
            elements,
            width * elements,
            width * channels,
            row["dtype"],
            function="convolution_backward",
            strided=row["channels_last"] or size == 1,
        )
        sum_s = estimate(total, gpu).time_s
        layout = "NHWC" if row["channels_last"] else "NCHW"
        for part, seconds in (("add", added_s), ("sum", sum_s)):
            if row[part]:
                ratios[f"{part} {layout} {row['dtype']}"].append(1e6 * seconds / row[part])
    for label, each in sorted(ratios.items()):
        print(
            f"{label:16} {len(each):4}: predicted over measured {median(each):.2f},"
            f" error {median(abs(r - 1) for r in each):.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=90)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--gpu", default="h100-sxm")
    args = parser.parse_args()
    if args.measured:
        predict(args.measured, args.gpu)
        return
    until = time.monotonic() + args.budget_s
    with gzip.open(args.out, "wt") as file:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), file=file)
        for case in drawn(args.seed):
            if time.monotonic() > until:
                break
            print(json.dumps(measure(case)), file=file, flush=True)


if __name__ == "__main__":
    main()
