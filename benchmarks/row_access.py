"""Rows of a table that are looked up, or added to, by random numbers: the time of each kernel on a GPU.

One row of the result a function, type, table, number of indices and width. Between calls the L2 cache is
overwritten.

    PYTHONPATH=src python benchmarks/row_access.py --seconds 60 --out row_access_h200.jsonl
    python benchmarks/row_access.py --measured benchmarks/results/row_access_h100.jsonl --gpu h100-sxm
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import kernel_times
import torch

from tilefit.ops import Streaming

aten = torch.ops.aten
Tensor = torch.Tensor
TABLES, INDICES = (200, 4_000, 60_000, 1_000_000), (500, 4_000, 60_000, 1_000_000)
WIDTHS = (1, 8, 64, 256, 1024)
#: Of 16 bits, only these.
HALF_WIDTHS = (8, 64, 256)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: ``(table, rows, their numbers)``.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_put": lambda table, rows, at: aten.index_put_(table, [at], rows, True),
    "index_put once": lambda table, rows, at: aten.index_put_(table, [at], rows, False),
    "index_add": lambda table, rows, at: table.index_add_(0, at, rows),
    "scatter_add": lambda table, rows, at: table.scatter_add_(0, at[:, None].expand_as(rows), rows),
    "scatter_add each": lambda table, rows, at: table.scatter_add_(
        0, at[:, None].repeat(1, rows.shape[1]), rows
    ),
    "embedding_dense_backward": lambda table, rows, at: aten.embedding_dense_backward(
        rows, at, len(table), -1, False
    ),
    "embedding": lambda table, rows, at: aten.embedding(table, at),
    "index": lambda table, rows, at: aten.index(table, [at]),
    "gather": lambda table, rows, at: table.gather(0, at[:, None].expand_as(rows)),
}


def call(case: dict[str, Any], device: torch.device) -> Callable[[], Tensor]:
    """A case's call."""
    made = torch.Generator(device).manual_seed(0)
    table = torch.zeros(case["table"], case["width"], device=device, dtype=DTYPES[case["dtype"]])
    rows = torch.randn(case["indices"], case["width"], device=device, generator=made).to(table.dtype)
    at = torch.randint(case["table"], (case["indices"],), device=device, generator=made)
    return lambda: FUNCTIONS[case["function"]](table, rows, at)


def cases(largest: int) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """In an order that leaves every function with some of everything, wherever it is cut off."""
    names = ("function", "dtype", "table", "indices", "width")
    every = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(FUNCTIONS, DTYPES, TABLES, INDICES, WIDTHS)
    ]
    random.Random(0).shuffle(every)
    for case in every:
        refused = case["function"] == "embedding_dense_backward" and case["width"] == 1
        fits = max(case["table"], case["indices"]) * case["width"] <= largest
        if fits and not refused and (case["dtype"] == "fp32" or case["width"] in HALF_WIDTHS):
            yield case, lambda device, case=case: call(case, device)


def op_of(case: dict[str, Any]) -> Streaming:
    """As a captured call is."""
    name, inner, picked, table = case["function"], case["width"], case["indices"], case["table"]
    size = DTYPES[case["dtype"]].itemsize
    moved, function = picked * inner * size, name.split()[0]
    read, written = moved + 8 * picked, moved
    if name == "embedding_dense_backward":
        least = min(moved, table * inner * size)
        read, written = read + least, table * inner * size + least
    elif function in ("index_add", "scatter_add", "index_put"):
        read += moved
    kernels = {"index_put": 16, "embedding_dense_backward": 2 if picked <= 3072 else 30}.get(name, 1)
    role = "embedding" if function.startswith("embedding") else "indexing"
    if name == "scatter_add each":
        inner, picked, table = 1, picked * inner, table * inner
    return Streaming(
        role, picked * inner, read, written, case["dtype"],
        inner=inner, kernels=kernels, function=function, picked=picked, table=table,
    )  # fmt: skip


if __name__ == "__main__":
    kernel_times.run(__doc__.splitlines()[0], cases, op_of, lambda case: case["function"])
