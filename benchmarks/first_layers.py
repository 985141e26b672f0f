"""Convolutions of images, of one to four channels: the time of each kernel on a GPU, forward and for weights.

One row of the result a layer, type, layout and pass. Between calls the L2 cache is overwritten.

    PYTHONPATH=src python benchmarks/first_layers.py --seconds 90 --out first_layers_h200.jsonl
    python benchmarks/first_layers.py --measured benchmarks/results/first_layers_h200.jsonl.gz
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import kernel_times
import torch

from tilefit.ops import BACKWARD_WEIGHT, FORWARD, Conv2d

aten = torch.ops.aten
BATCHES, IMAGES, CHANNELS, FILTERS = (16, 64, 256), (32, 64, 128, 224), (1, 3, 4), (16, 64, 128)
#: Width of the filter and its step.
WINDOWS = ((3, 1), (3, 2), (4, 2), (5, 1), (7, 2), (16, 16))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def call(case: dict[str, Any], device: torch.device) -> Callable[[], Any]:
    """A case's call."""
    dtype, layout = DTYPES[case["dtype"]], LAYOUTS[case["layout"]]
    size, step, image = case["window"], case["step"], case["image"]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout)

    x = tensor(case["batch"], case["channels"], image, image)
    weight = tensor(case["filters"], case["channels"], size, size)
    padding = _padding(case)
    told = [step, step], [padding, padding], [1, 1], False, [0, 0], 1
    if case["pass"] == "forward":
        return lambda: aten.convolution(x, weight, None, *told)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *told))
    return lambda: aten.convolution_backward(gradient, x, weight, [0], *told, [False, True, False])


def _padding(case: dict[str, Any]) -> int:
    size = int(case["window"])
    return 0 if size == case["step"] else size // 2 if size % 2 else 1


def op_of(case: dict[str, Any]) -> Conv2d:
    """As a captured call is."""
    sizes = case["image"], case["window"], case["step"], _padding(case)
    return Conv2d(
        case["batch"], case["channels"], case["filters"], *((each, each) for each in sizes),
        dtype="tf32" if case["dtype"] == "fp32" else case["dtype"],
        direction=FORWARD if case["pass"] == "forward" else BACKWARD_WEIGHT,
        channels_last=case["layout"] == "NHWC",
    )  # fmt: skip


def kind(case: dict[str, Any]) -> str:
    return " ".join((case["dtype"], case["layout"], case["pass"]))


def cases(largest: int) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """In an order that leaves every kind with some of everything, wherever it is cut off."""
    names = ("batch", "image", "channels", "filters", "window", "dtype", "layout", "pass")
    every = itertools.product(
        BATCHES, IMAGES, CHANNELS, FILTERS, WINDOWS, DTYPES, LAYOUTS, ("forward", "weight")
    )
    listed = [dict(zip(names, values, strict=True)) for values in every]
    random.Random(0).shuffle(listed)
    for case in listed:
        case["window"], case["step"] = case["window"]
        written = case["batch"] * (case["image"] // case["step"]) ** 2 * case["filters"]
        if written <= largest:
            yield case, lambda device, case=case: call(case, device)


if __name__ == "__main__":
    kernel_times.run(__doc__.splitlines()[0], cases, op_of, kind)
