"""Other routes for dense convolutions with large filters, each pass timed on a GPU.

cuDNN runs filters of 5 by 5 and larger, in 16 bits, by kernels that differ by an order of magnitude from one
size to the next. Routes to the same result: another layout, type or algorithm; a product of unfolded patches;
a sum over parts of the input channels; a sum over the rows of the filter. One row a shape, pass and route:
microseconds, and how far the result is from that of fp32, over its largest value.

    PYTHONPATH=src python benchmarks/large_filters.py --seconds 60 --out large_filters_h100.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import conv2d, unfold

from tilefit.measure.timer import CudaDevice, Device, HostDevice, measure

#: Batch, channels in and out, image, filter.
SHAPES = (
    (64, 64, 64, 56, 7),
    (8, 48, 512, 112, 7),
    (32, 128, 128, 28, 7),
    (32, 256, 256, 14, 7),
    (32, 128, 128, 28, 5),
    (64, 64, 64, 56, 5),
    (32, 32, 32, 56, 9),
    (16, 64, 128, 64, 11),
    (32, 256, 256, 14, 5),
    (64, 96, 96, 28, 7),
    (32, 192, 192, 28, 7),
    (32, 64, 192, 27, 5),
)
TINY = ((2, 8, 8, 6, 5),)
Route = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return conv2d(x, weight, padding=weight.shape[-1] // 2)


def patches(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product of the unfolded patches."""
    size = weight.shape[-1]
    columns = unfold(x, size, padding=size // 2)
    return (weight.flatten(1) @ columns).unflatten(2, x.shape[2:])


def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A sum over two halves of the input channels."""
    middle = x.shape[1] // 2
    return plain(x[:, :middle], weight[:, :middle]) + plain(x[:, middle:], weight[:, middle:])


def filter_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A sum over the rows of the filter, each a convolution of one row."""
    size, height = weight.shape[-1], x.shape[2]
    padded = torch.nn.functional.pad(x, (0, 0, size // 2, size // 2))
    total = None
    for row in range(size):
        part = conv2d(padded[:, :, row : row + height], weight[:, :, row : row + 1], padding=(0, size // 2))
        total = part if total is None else total + part
    assert total is not None
    return total


#: Name: type, channels-last, the autotuner, how it is computed.
ROUTES: dict[str, tuple[torch.dtype, bool, bool, Route]] = {
    "NCHW": (torch.bfloat16, False, False, plain),
    "channels-last": (torch.bfloat16, True, False, plain),
    "fp16": (torch.float16, False, False, plain),
    "fp16 channels-last": (torch.float16, True, False, plain),
    "autotuned": (torch.bfloat16, False, True, plain),
    "autotuned channels-last": (torch.bfloat16, True, True, plain),
    "patches": (torch.bfloat16, False, False, patches),
    "halves channels-last": (torch.bfloat16, True, False, halves),
    "filter rows channels-last": (torch.bfloat16, True, False, filter_rows),
}


@contextmanager
def autotuner(on: bool):  # type: ignore[no-untyped-def]
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, on
    yield
    torch.backends.cudnn.benchmark = before


def factories(
    shape: tuple[int, ...], route: str, device: str
) -> dict[str, Callable[[], Callable[[], torch.Tensor]]]:
    """What builds the calls of a route's passes, the forward pass that a backward pass needs included: it has
    to be on the stream of the timer."""
    n, channels, filters, image, size = shape
    dtype, last, _, compute = ROUTES[route]
    layout = torch.channels_last if last else torch.contiguous_format
    made = torch.Generator().manual_seed(0)

    def tensor(scale: float, *sizes: int) -> torch.Tensor:
        values = (scale * torch.randn(sizes, generator=made)).to(device, dtype)
        return values.contiguous(memory_format=layout).requires_grad_()

    x, weight = tensor(1.0, n, channels, image, image), tensor(0.02, filters, channels, size, size)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return compute(x, weight)

    def backward(of: torch.Tensor) -> Callable[[], torch.Tensor]:
        output = compute(x, weight)
        gradient = torch.ones_like(output)
        return lambda: torch.autograd.grad(output, of, gradient, retain_graph=True)[0]

    return {"forward": lambda: forward, "data": lambda: backward(x), "weight": lambda: backward(weight)}


def measured(
    shape: tuple[int, ...], timed: Device, device: str, exact: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Rows of one shape."""
    found = []
    for route, (dtype, _, tuned, _) in ROUTES.items():
        with autotuner(tuned):
            for direction, factory in factories(shape, route, device).items():
                row: dict[str, Any] = {"shape": shape, "pass": direction, "route": route}
                try:
                    row["us"] = round(1e6 * measure(factory, timed, cold=False, replays=5).median_s, 1)
                    result = factory()().float().cpu()
                    truth = exact.setdefault(direction, result) if dtype == torch.bfloat16 else result
                    row["difference"] = float((result - truth).abs().max() / truth.abs().max())
                except RuntimeError as error:
                    row["failure"] = str(error).partition("\n")[0]
                found.append(row)
                print(json.dumps(row), flush=True)
                # What a captured graph, and the patches of another route, keep allocated.
                gc.collect()
                torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    timed = CudaDevice() if on_gpu else HostDevice()
    end = time.monotonic() + args.seconds
    with args.out.open("a") as file:
        for shape in SHAPES if on_gpu else TINY:
            if time.monotonic() > end:
                break
            for row in measured(shape, timed, args.device, {}):
                file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
