"""How far off prices are on another machine: rows that ``collect_together.py`` wrote there.

    PYTHONPATH=src python benchmarks/other_machine.py benchmarks/results/rows_seventh_h100 --gpu h100-sxm
    PYTHONPATH=src python benchmarks/other_machine.py benchmarks/results/rows_third_h200 --gpu h200

The seventh H100 and the third H200 teach nothing. Of the sixth and the eighth an H100's networks were taught
(of products and convolutions on both, of memory-bound operations on the sixth), of the second H200 an H200's;
there only the families that ``pack_h200.py`` holds out are of interest, which are told apart of every
machine. Half of the aligned products were left out when they were drawn.
"""

from __future__ import annotations

import argparse
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
from fit_calibration import READERS, unseen
from pack_h200 import HELD_OUT, family
from pack_h200 import rows as collected

from tilefit.cost.kernels import select
from tilefit.cost.model import by_stages
from tilefit.cost.priced import as_shipped, left_out
from tilefit.cost.streaming import traffic
from tilefit.gpus import Gpu, get
from tilefit.ops import Conv, Gemm, Op
from tilefit.ops.dtypes import ALIGNMENT_BYTES


def group(op: Op, gpu: Gpu) -> str:
    """What errors are told by."""
    match op:
        case Gemm():
            return f"products, {'' if select(op, gpu).alignment_bytes >= ALIGNMENT_BYTES else 'mis'}aligned"
        case Conv():
            kind = "one group" if op.groups == 1 else "depthwise" if op.is_depthwise else "groups"
            return f"convolutions, {kind}"
    return "memory-bound operations"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", required=True, help="of these rows")
    parser.add_argument("--most", type=int, default=100_000, help="rows of a kind that are priced")
    options = parser.parse_args()
    gpu = get(options.gpu)
    divisor, remainder = HELD_OUT
    for part in ("gemm", "conv", "streaming"):
        found: list[tuple[Op, float, bool]] = []
        for row in collected([options.folder], part):
            op = READERS[part](row)
            if op is not None:
                held_out = zlib.crc32(family(part, row).encode()) % divisor == remainder
                found.append((traffic(op), float(row["us"]) * 1e-6, held_out or unseen(part, row)))
        found = found[:: max(1, len(found) // options.most)]
        ops, times = [op for op, *_ in found], np.array([time_s for _, time_s, _ in found])
        groups = [(group(op, gpu), held_out) for op, _, held_out in found]
        for name, device in (("nothing fitted", left_out(gpu)), ("ships", as_shipped(gpu))):
            told = by_stages(ops, device)
            rows = np.array([(each.time_s, each.low_s, each.high_s) for each in told]) / times[:, None]
            chosen: dict[str, list[int]] = defaultdict(list)
            for index, (each, held_out) in enumerate(groups):
                for label in {each, each.partition(",")[0]}:
                    chosen[f"{label}; all"].append(index)
                    if held_out:
                        chosen[f"{label}; families held out"].append(index)
            for label, indices in sorted(chosen.items()):
                ratio, low, high = rows[indices].T
                off = np.abs(ratio - 1)
                inside = np.mean((low <= 1) & (high >= 1))
                print(
                    f"{label:45} {name:14} {len(off):5}: {off.mean():5.1%} off, median {np.median(off):.1%}; "
                    f"predicted over measured {np.median(ratio):.3f}; {inside:.0%} inside",
                    flush=True,
                )


if __name__ == "__main__":
    main()
