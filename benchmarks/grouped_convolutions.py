"""How many times as long grouped convolutions take as the product of all their groups, by an H200's profile.

    PYTHONPATH=src python benchmarks/grouped_convolutions.py

By channels of a group, in and out alike; medians over 2, 4 and 8 groups, filters of 3 and 5, strides of 1 and
2, images of 56 and 14 pixels, batches of 32 and 256. ``tilefit.cost.conv`` takes them over to other GPUs.
"""

from __future__ import annotations

from itertools import product
from statistics import median

from tilefit.cost.analytic import analytic
from tilefit.cost.conv import _over_product
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import priced
from tilefit.ops import Conv2d
from tilefit.ops.base import DIRECTIONS

CHANNELS = (8, 16, 24, 32, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
WIDEST = 2048
SIZES = tuple(product((2, 4, 8), (3, 5), (1, 2), (56, 14), (32, 256)))


def main() -> None:
    gpu = priced("h200")
    print("channels of a group:", *(f"{channels:4}" for channels in CHANNELS))
    for last, direction in product((True, False), DIRECTIONS):
        found = []
        for channels in CHANNELS:
            ops = [
                Conv2d(
                    batch, groups * channels, groups * channels, pixels, taps, stride, taps // 2,
                    groups=groups, dtype="fp16", channels_last=last, direction=direction,
                )
                for groups, taps, stride, pixels, batch in SIZES
                if groups * channels <= WIDEST
            ]  # fmt: skip
            times = zip(ops, estimate_all(ops, gpu), strict=True)
            found.append(
                median(e.time_s / analytic(op, gpu).time_s * _over_product(op, gpu) for op, e in times)
            )
        print(f"{'NHWC' if last else 'NCHW'} {direction:15}", *(f"{each:4.1f}" for each in found))


if __name__ == "__main__":
    main()
