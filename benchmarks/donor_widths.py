"""How wide intervals of an H200's convolutions are: set by rows of H100s, which run the same kernels.

    PYTHONPATH=src python benchmarks/donor_widths.py benchmarks/results/rows_{sixth,eighth}_h100

The H200's own rows, by which its networks were taught, say little of another machine. What its times, carried
over, are off on two H100s sets the quantiles of ``src/tilefit/cost/data/h200-donor.npz``, apart of depthwise
and of grouped convolutions. Of depthwise ones those count of which the memory accounts for less than half:
what is carried over of the others errs more than the H200's own. What ships on top of it is then told that
the file that it corrects is another. Judged on other machines by ``other_machine.py``. The rule for depthwise
ones was chosen when the second H200's were seen to be too wide without it (90 %).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from compress_calibration import compress
from fit_calibration import READERS
from pack_h200 import rows as collected

from tilefit import gpus
from tilefit.cost import priced
from tilefit.cost.calibration import WIDEST
from tilefit.cost.features import apart, features
from tilefit.cost.model import by_stages
from tilefit.cost.tables import DATA
from tilefit.ops import Op

KIND, DONOR, ON_TOP = "conv", "h200-donor", ("h200", "h100-sxm")
TAILS = (0.1, 0.9)
#: One row in so many is looked at.
EVERY = 3
#: Most of a depthwise convolution's time that its memory accounts for.
MOST_MEMORY = 0.5


def measured(folder: Path) -> dict[Op, float]:
    """Operations of a machine and what they took [s]."""
    found: dict[Op, float] = {}
    for row in collected([folder], KIND):
        op = READERS[KIND](row)
        if op is not None:
            found.setdefault(op, float(row["us"]) * 1e-6)
    return dict([*found.items()][::EVERY])


def change(name: str, **facts: Any) -> dict[str, Any]:
    """Write a calibration that ships anew, with other facts."""
    path = DATA / f"{name}.npz"
    with np.load(path) as file:
        arrays = {each: file[each] for each in file.files}
    about: dict[str, Any] = json.loads(str(arrays["about"]))
    for kind, more in facts.pop("networks", {}).items():
        about["networks"][kind] |= more
    arrays["about"] = np.array(json.dumps(about | facts))
    with path.open("wb") as written:
        np.savez_compressed(written, **arrays)
    compress(path)
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="rows of H100s")
    options = parser.parse_args()
    donor, gpu = (gpus.get(name) for name in ON_TOP)
    device = priced.left_out(gpu)
    net = device.calibration.networks[KIND]
    found: dict[str, list[float]] = {}
    for folder in options.folders:
        rows = measured(folder)
        told = by_stages([*rows], device)
        spreads = np.exp(np.minimum(net([features[type(op)](op, donor)[1] for op in rows])[:, 1], WIDEST))
        for (op, time_s), each, spread in zip(rows.items(), told, spreads, strict=True):
            if (name := apart(op, donor)) != "depthwise" or each.memory_s < MOST_MEMORY * each.time_s:
                found.setdefault(name, []).append(np.log(time_s / each.time_s) / spread)
    widths = {name: [round(float(q), 4) for q in np.quantile(each, TAILS)] for name, each in found.items()}
    print({name: (len(found[name]), each) for name, each in widths.items()})
    change(DONOR, networks={KIND: {"quantiles": widths.pop(""), "apart": widths}})
    priced.shipped.cache_clear()
    priced._donated.cache_clear()
    for name in ON_TOP:
        change(name, on=priced.basis(priced.left_out(donor)))


if __name__ == "__main__":
    main()
