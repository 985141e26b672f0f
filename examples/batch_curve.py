"""How fast a linear layer runs as the batch grows, on two GPUs: where is the knee?

Run it with: python examples/batch_curve.py
"""

from __future__ import annotations

import tilefit

FEATURES = 4096
GPUS = ("h200", "l4")


def main() -> None:
    print(f"Linear({FEATURES}, {FEATURES}) in bf16, TFLOP/s and what limits it")
    print(f"{'batch':>6}", *(f"{gpu:>16}" for gpu in GPUS))
    for batch in (1, 4, 16, 64, 256, 1024, 4096):
        layer = tilefit.ops.Gemm(batch, FEATURES, FEATURES, dtype="bf16", layout="TN")
        cells = []
        for gpu in GPUS:
            estimate = tilefit.estimate(layer, gpu=gpu)
            cells.append(f"{layer.flop / estimate.time_s / 1e12:8.1f} {estimate.bound:<7}")
        print(f"{batch:>6}", *cells)


if __name__ == "__main__":
    main()
