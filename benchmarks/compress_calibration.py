"""A calibration's file, as small as deflate makes it: weights are nearly noise, of which codes of fewer
matches and larger blocks take less.

    python benchmarks/compress_calibration.py src/tilefit/cost/data/h200.npz

The arrays stay what they are.
"""

from __future__ import annotations

import sys
import zipfile
import zlib
from pathlib import Path


def compress(path: Path) -> None:
    """Write the file anew."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    made = zlib.compressobj
    zlib.compressobj = lambda level, method, bits: made(9, method, bits, 9, zlib.Z_FILTERED)  # type: ignore[assignment]
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in members.items():
                file.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    finally:
        zlib.compressobj = made


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        compress(Path(argument))
        print(f"{argument}: {Path(argument).stat().st_size:,} bytes")
