"""A calibration's file, as small as deflate makes it: weights are nearly noise, of which codes of fewer
matches and larger blocks take less, and the bytes of its numbers stand together.

    PYTHONPATH=src python benchmarks/compress_calibration.py src/tilefit/cost/data/h200-donor.npz

The numbers stay what they are, but of the kinds that ``--in-steps`` names: their weights become whole steps
of one byte, a step for each output. So an H200's attention changes by 0.1 % and its memory-bound operations
by 0.24 % in the mean (at most 0.6 and 2 %), its products would by 0.5 %.
"""

from __future__ import annotations

import argparse
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def number_bytes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Numbers as their bytes [..., bytes], all first ones before all second ones: exponents are alike, and
    take a file less space where they stand together."""
    little = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
    return np.asfortranarray(little[..., None].view(np.uint8))


def compress(path: Path, in_steps: Sequence[str] = ()) -> None:
    """Write the file anew, the weights of some kinds in whole steps."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    for name in [each for each in arrays if re.fullmatch(rf"({'|'.join(in_steps)})/weight\d", each)]:
        if (kept := arrays[name]).dtype == np.uint8:
            kept = np.ascontiguousarray(kept).view(f"<f{kept.shape[-1]}")[..., 0]
        if kept.dtype.kind == "f":
            arrays[name], arrays[f"{name}_step"] = whole(kept.astype(np.float32))
    arrays = {name: smaller(values) for name, values in arrays.items()}
    made = zlib.compressobj

    def smallest(level: int, method: int, bits: int) -> Any:
        return made(9, method, bits, 9, zlib.Z_FILTERED)

    zlib.compressobj = smallest  # type: ignore[assignment]
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, values in arrays.items():
                data = io.BytesIO()
                np.save(data, values)
                file.writestr(zipfile.ZipInfo(f"{name}.npy"), data.getvalue(), zipfile.ZIP_DEFLATED)
    finally:
        zlib.compressobj = made


def whole(weights: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Weights [members, inputs, outputs] in whole steps, and the step of each output."""
    step = np.maximum(np.abs(weights).max(axis=1, keepdims=True), 1e-8) / 127
    return np.round(weights / step).astype(np.int8), step.astype(np.float32)


def smaller(values: NDArray[Any]) -> NDArray[Any]:
    """An array, or the bytes of its numbers where these take less space."""
    if values.dtype.kind != "f":
        return values
    split = number_bytes(values)
    sizes = [len(zlib.compress(each.tobytes("A"), 9)) for each in (values, split)]
    return split if sizes[1] < sizes[0] else values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--in-steps", nargs="*", default=[], help="kinds whose weights become whole steps")
    options = parser.parse_args()
    for each in options.files:
        compress(each, options.in_steps)
        print(f"{each}: {each.stat().st_size:,} bytes")
