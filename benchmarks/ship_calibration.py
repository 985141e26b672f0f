"""Make a calibration small enough to ship: one small network of each kind says what its ensemble does.

What ``tilefit calibrate`` wrote on a GPU, on top of a donor's calibration that ships, is asked about tens of
thousands of operations, and a network of a tenth of the size is fitted to the answers. Prints how far the two
are apart on other operations. The host's factor is not the GPU's and is left out.

Memory-bound operations alone ship. Of products and convolutions the donor knows more: of 6,000 and 3,200 that
an H100 ran later (``collect_h200.py --seed 7071``) what three minutes had taught was 8.6 and 14.6 % off, the
H200's times carried over 7.0 and 12.3 %; of published products 6.9 and 6.4 %; and the GPU's time of 71 whole
steps 2.1 % in the median, without these networks 1.7 %.

    PYTHONPATH=src python benchmarks/ship_calibration.py h100.npz src/tilefit/cost/data/h100-sxm.npz
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tilefit import gpus
from tilefit.cost.calibration import FORMAT, Calibration, fingerprint, load, on_analytic
from tilefit.cost.model import by_stages
from tilefit.cost.priced import PricedGpu, left_out
from tilefit.cost.streaming import traffic
from tilefit.measure.calibration import candidates

LONGEST_S = 10e-3
CHUNK, ASIDE = 1000, 10
BATCH = 256
EPOCHS = 60


def inputs(kind: str, number: int, own: Calibration, before: PricedGpu) -> NDArray[np.float32]:
    """What the networks see of operations of a kind."""
    found, drawn = [], candidates(seed=11)[kind]
    for _ in range(number // CHUNK):
        ops = [each.op for each in islice(drawn, CHUNK)]
        ops = [op for op in ops if before.supports(op.dtype) and own.covers(op)]
        first = by_stages([traffic(op) for op in ops], before, own.constants)
        short = [i for i, each in enumerate(first) if each.time_s < LONGEST_S]
        found.append(on_analytic([ops[i] for i in short], before, [first[i] for i in short])[1])
    return np.concatenate(found)


def fitted(x: NDArray[np.float32], y: NDArray[np.float32], width: int) -> list[nn.Linear]:
    """A small network, its inputs normalised, fitted to outputs."""
    torch.manual_seed(0)
    sizes = (x.shape[1], width, width, y.shape[1])
    layers = [nn.Linear(*each) for each in pairwise(sizes)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    rows, truth = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(steps):
        chosen = torch.randint(len(rows), (BATCH,))
        loss = nn.functional.smooth_l1_loss(net(rows[chosen]), truth[chosen], beta=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return layers


def small(kind: str, own: Calibration, before: PricedGpu, number: int, width: int) -> dict[str, Any]:
    """The arrays of one kind; prints how well they say what the ensemble says."""
    network = own.networks[kind]
    rows = inputs(kind, number, own, before)
    told = network(rows)
    x = (np.clip(rows, network.low, network.high) - network.mean) / network.scale
    aside = np.arange(len(x)) // 100 % ASIDE == 0
    arrays: dict[str, Any] = {n: getattr(network, n) for n in ("low", "high", "mean", "scale")}
    y = x[aside]
    layers = fitted(x[~aside], told[~aside], width)
    for index, layer in enumerate(layers):
        weight = layer.weight.detach().numpy().T[None]
        step = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-8) / 127
        arrays[f"weight{index}"] = np.round(weight / step).astype(np.int8)
        arrays[f"weight{index}_step"] = step.astype(np.float32)
        arrays[f"bias{index}"] = layer.bias.detach().numpy()[None, None].astype(np.float16)
        y = y @ (arrays[f"weight{index}"][0] * step[0]) + arrays[f"bias{index}"][0]
        y = np.maximum(y, 0.0) if index < len(layers) - 1 else y
    off, whole = np.abs(y[:, 0] - told[aside, 0]), np.abs(told[aside, 0])
    print(
        f"{kind}: {len(x)} operations; corrections of {whole.mean():.1%} said to {off.mean():.1%},"
        f" {np.median(off):.1%} in the median, {np.quantile(off, 0.95):.1%} at 95 %",
        flush=True,
    )
    return {f"{kind}/{name}": values for name, values in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--operations", type=int, default=30_000, help="asked about, of each kind")
    parser.add_argument("--kinds", nargs="+", default=["streaming"], help="that ship; others are the donor's")
    parser.add_argument("--width", type=int, default=64, help="of the small networks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    own = load(args.calibration)
    gpu = gpus.get(own.about["gpu"])
    before = left_out(gpu)
    assert own.constants is not None
    arrays: dict[str, Any] = {}
    own.about["networks"] = {kind: own.about["networks"][kind] for kind in args.kinds}
    for kind in args.kinds:
        arrays |= small(kind, own, before, args.operations, args.width)
        own.about["networks"][kind]["fingerprint"] = fingerprint(kind, gpu, True)
    about = own.about | {
        "launch_scale": 1.0,
        "collected": [own.about["date"][:10]],
        "constants": {
            k: v if isinstance(v, str) else float(f"{v:.4g}") for k, v in asdict(own.constants).items()
        },
        "format": FORMAT,
    }
    with args.out.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
