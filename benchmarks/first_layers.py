"""Convolutions of images, of one to four channels: the time of each kernel on a GPU, forward and for weights.

One row of the result a layer, type, layout and pass. Between calls the L2 cache is overwritten.

    PYTHONPATH=src python benchmarks/first_layers.py --seconds 90 --out first_layers_h200.jsonl
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import kernel_times
import torch

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
    padding = 0 if size == step else size // 2 if size % 2 else 1
    told = [step, step], [padding, padding], [1, 1], False, [0, 0], 1
    if case["pass"] == "forward":
        return lambda: aten.convolution(x, weight, None, *told)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *told))
    return lambda: aten.convolution_backward(gradient, x, weight, [0], *told, [False, True, False])


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
    kernel_times.run(__doc__.splitlines()[0], cases)
