"""Turn what collect_h200.py wrote into one compact Parquet file per kind of operation.

    PYTHONPATH=src python benchmarks/pack_h200.py results/1 results/2 --out packed

Rows that failed are dropped. Times keep 12 bits of mantissa (a relative error of 1.2e-4, far below their
spread). ``held_out`` marks the test set, chosen by family so that a test shape has no near neighbour in the
training set: all products whose weights have about the same two sizes (within a cell of 19 %), whatever the
rows, layout, type or model; all convolutions whose weights have the same sizes; and so on.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from kernels import main_kernel, parse

PARTS = ("gemm", "conv", "attention", "streaming", "recurrent")
DROPPED = ("out_dtype", "ld_b", "packed", "proj_size", "error", "high_us", "low_us", "calls", "all_kernels")
IMPLIED = (
    "role",
    "elements",
    "read_bytes",
    "write_bytes",
    "flop_per_element",
    "inner",
    "strided",
    "name",
    "function",
)
TEXTS = ("dtype", "layout", "direction", "source", "name", "benchmark", "mode", "kernel", "family")
FLAGS = ("bias", "channels_last", "is_causal", "strided", "bidirectional")
HELD_OUT = (8, 5)  # one family in 8: those whose checksum leaves 5 (which gives 10 to 14 % of every part)


def rows(folders: list[Path], part: str) -> Iterator[dict[str, str]]:
    for folder in folders:
        for path in sorted(folder.glob(f"{part}-*.csv.gz")):
            with gzip.open(path, "rt", newline="") as file:
                for row in csv.DictReader(file):
                    if row["error"]:
                        continue
                    if part == "streaming":  # what the microbenchmark's name implies is not repeated
                        name, _, shape = row["name"].partition(":")
                        size, _, inner = shape.partition("x")
                        row = {"benchmark": name, "rows": size, "inner_size": inner} | {
                            key: value for key, value in row.items() if key not in IMPLIED
                        }
                    yield row


def family(part: str, row: dict[str, str]) -> str:
    """What is held out together."""
    if part == "gemm":  # the weights' sizes; a weight gradient computes them
        sizes = (row["m"], row["n"]) if row["layout"] == "NT" else (row["n"], row["k"])
        return "/".join(str(round(4 * log2(int(size)))) for size in sorted(sizes, key=int))
    if "function" in row:
        return "/".join((row["function"], row["inner"], str(round(log2(int(row["elements"]) or 1)))))
    if part != "conv" and not row["source"].startswith(("grid", "stream")):
        return row["source"]
    keys = {
        "conv": ("in_channels", "out_channels", "kernel_size"),
        "attention": ("num_heads", "head_dim", "seq_len"),
        "recurrent": ("mode", "hidden_size", "seq_len", "batch"),
        "streaming": ("benchmark", "inner_size"),
    }[part]
    return "/".join(row[key] for key in keys)


def kernel_name(row: dict[str, str]) -> str:
    """The kernel that did the work."""
    name = row["kernel"]
    others = [other for other in row.get("all_kernels", "").split(";") if other]
    if main_kernel([(name, 1.0)]) == name and "splitKreduce" in name and others:
        name = main_kernel([(other, -i) for i, other in enumerate(others)])
    # The short name that early collections gave to internal::gemvx::kernel.
    return "gemvx::kernel" if name == "enable_if" else name


def rounded(values: list[float]) -> np.ndarray[Any, Any]:
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x400) & np.uint32(0xFFFFF800)).view(np.float32)


def table(part: str, found: list[dict[str, str]]) -> pa.Table:
    columns: dict[str, Any] = {}
    for key in found[0]:
        if key in DROPPED:
            continue
        values = [row[key] for row in found]
        if key == "kernel":
            names = [kernel_name(row) for row in found]
            parsed = {name: parse(name) for name in set(names)}
            columns["kernel"] = pa.array(names).dictionary_encode()
            columns["kernel_family"] = pa.array([parsed[name].family for name in names]).dictionary_encode()
        elif key in TEXTS:
            columns[key] = pa.array(values).dictionary_encode()
        elif key in FLAGS:
            columns[key] = pa.array([value == "1" for value in values])
        elif key in ("us", "warm_us", "elapsed_us"):
            columns[key] = rounded([float(value) if value else float("nan") for value in values])
        elif any("x" in value for value in values):  # sizes of one to three dimensions
            columns[key] = pa.array(values).dictionary_encode()
        elif all(re.fullmatch(r"-?\d*", value) for value in values):
            columns[key] = pa.array([int(value) if value else None for value in values])
        else:
            columns[key] = pa.array([float(value) for value in values], pa.float32())
    divisor, remainder = HELD_OUT
    held_out = [zlib.crc32(family(part, row).encode()) % divisor == remainder for row in found]
    columns["held_out"] = pa.array(held_out)
    # A column of one value says nothing.
    return pa.table({key: column for key, column in columns.items() if len(set(map(str, column[:5000]))) > 1})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders of collect_h200.py's files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gemm-rows", type=int, default=180_000, help="products kept, evenly over all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {}
    for part in PARTS:
        found = list(rows(args.folders, part))
        if not found:
            continue
        collected = len(found)
        if part == "gemm" and collected > args.gemm_rows:
            found = [found[i * collected // args.gemm_rows] for i in range(args.gemm_rows)]
        path = args.out / f"{part}.parquet"
        packed = table(part, found)
        times = [name for name in packed.column_names if name.endswith("us")]
        texts = [name for name in packed.column_names if pa.types.is_dictionary(packed[name].type)]
        pq.write_table(
            packed,
            path,
            compression="zstd",
            compression_level=19,
            use_dictionary=texts,
            use_byte_stream_split=times,
        )
        held_out = int(np.sum(packed["held_out"].to_numpy()))
        summary[part] = {
            "collected": collected,
            "rows": len(found),
            "held_out": held_out,
            "bytes": path.stat().st_size,
        }
        print(part, summary[part])
    provenance = [
        json.loads(path.read_text())
        for folder in args.folders
        for path in sorted(folder.glob("*.json"))
        if path.stem.rpartition("-")[0] in PARTS
    ]
    (args.out / "collection.json").write_text(
        json.dumps({"packed": summary, "runs": provenance}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
