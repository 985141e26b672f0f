"""How far off prices are on another machine: rows that ``collect_together.py`` wrote there.

    PYTHONPATH=src python benchmarks/other_machine.py benchmarks/results/rows_sixth_h100 --gpu h100-sxm

Nothing of the rows is fitted to but the H100's own networks of memory-bound operations: of these the held-out
families alone are scored. Half of the aligned products were left out when they were drawn.
"""

from __future__ import annotations

import argparse
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
from fit_calibration import READERS
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
    parser.add_argument("--most", type=int, default=4000, help="of a kind that are priced, evenly over all")
    options = parser.parse_args()
    gpu = get(options.gpu)
    divisor, remainder = HELD_OUT
    for part in ("gemm", "conv", "streaming"):
        found: list[tuple[Op, float]] = []
        for row in collected([options.folder], part):
            op = READERS[part](row)
            held_out = zlib.crc32(family(part, row).encode()) % divisor == remainder
            if op is not None and (held_out or part != "streaming"):
                found.append((traffic(op), float(row["us"]) * 1e-6))
        found = found[:: max(1, len(found) // options.most)]
        ops, times = [op for op, _ in found], np.array([time_s for _, time_s in found])
        groups = [group(op, gpu) for op in ops]
        for name, device in (("nothing fitted", left_out(gpu)), ("ships", as_shipped(gpu))):
            told = by_stages(ops, device)
            rows = np.array([(each.time_s, each.low_s, each.high_s) for each in told]) / times[:, None]
            chosen: dict[str, list[int]] = defaultdict(list)
            for index, each in enumerate(groups):
                for label in {each, each.partition(",")[0]}:
                    chosen[label].append(index)
            for label, indices in sorted(chosen.items()):
                ratio, low, high = rows[indices].T
                off = np.abs(ratio - 1)
                inside = np.mean((low <= 1) & (high >= 1))
                print(
                    f"{label:27} {name:14} {len(off):5}: {off.mean():5.1%} off, median {np.median(off):.1%}; "
                    f"predicted over measured {np.median(ratio):.3f}; {inside:.0%} inside",
                    flush=True,
                )


if __name__ == "__main__":
    main()
