"""Recurrent layers of ``torch.nn`` by cuDNN, in a CUDA graph: what a time step takes without the host.

Rows of the table by which recurrent layers are priced (``cost/data/recurrent``), for an element type that the
persistent kernels do not have: fp32, of which the products are in TF32, as PyTorch has it by default. Lower
quartiles, microseconds a time step, the input's product included.

    PYTHONPATH=src python benchmarks/recurrent_cudnn.py --seconds 110 --out recurrent_cudnn_h200.json
    python benchmarks/recurrent_cudnn.py --install recurrent_cudnn_h200.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

import torch
from recurrent import install, provenance
from recurrent_common import CELLS, DTYPES, NAMES, Setting, runs

from tilefit.cost.recurrent_times import Row

HIDDEN = (32, 64, 128, 192, 256, 512, 1024, 2048)
BATCHES = (1, 8, 20, 32, 64, 128, 256)
STEPS = (16, 64, 200)
ROUNDS = 4


def rows(setting: Setting, dtype: str) -> list[Row]:
    """In an order that leaves every cell with some of everything, wherever it is cut off."""
    sizes = [((8,), (1, 2), (3,))] if setting.tiny else [(HIDDEN, BATCHES, STEPS)]
    every = [
        case for hidden, batch, steps in sizes for case in itertools.product(CELLS, hidden, batch, steps)
    ]
    every = [case for case in every if case[0] != "relu"]
    random.Random(0).shuffle(every)
    made = []
    for cell, hidden, batch, steps in setting.within(every):
        kind, extra = CELLS[cell]
        layer = kind(hidden, hidden, device=setting.device, dtype=DTYPES[dtype], **extra)
        x = setting.random(steps, batch, hidden, dtype=DTYPES[dtype]).requires_grad_()
        gradient = setting.random(steps, batch, hidden, dtype=DTYPES[dtype])
        for training, passes in ((False, "forward"), (True, "both")):
            replay = setting.captured(runs(layer, x, gradient, passes))
            step_us = setting.interleaved({"cudnn": replay}, ROUNDS)["cudnn"] / steps
            size = (NAMES[cell], "tf32" if dtype == "fp32" else dtype, hidden, batch, steps, 1, training)
            made.append(Row(*size, None, None, None, round(step_us, 3)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs")
    parser.add_argument("--install", type=Path, help="rows of --out, to be put into the package's table")
    options = parser.parse_args()
    if options.install:
        content = json.loads(options.install.read_text())
        install((Row(*row) for row in content.pop("rows")), content)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(device, options.tiny, None, options.seconds)
    found = rows(setting, options.dtype)
    content = provenance(setting.on_gpu) | {"rows": found}
    if options.out:
        options.out.write_text(json.dumps(content) + "\n")
    print(f"{len(found)} rows")


if __name__ == "__main__":
    main()
