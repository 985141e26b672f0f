"""What the networks that ship for a GPU would learn from another GPU of its architecture.

    PYTHONPATH=src python benchmarks/refine_calibration.py --rows benchmarks/results/rows_*_h100 --out nets

ROWS are folders of ``collect_together.py``, each of one machine. What it took is carried back to the GPU
whose calibration ships (as :mod:`tilefit.cost.transfer` carries times over, solved for the donor's time),
without what this machine differs by altogether: a line, bent twice, over the logarithm of the time. The
networks learn on from these rows, and are held to what they said of operations drawn anew, so that nothing is
forgotten that the rows do not speak of. The rows that they were fitted to first (``fit_calibration.py``) are
not needed.

Families that ``pack_h200.py`` holds out are scored and never fitted to. Told are of what is carried over to
the machine: rows, mean and median error, mean error apart from the machine's line, share inside the interval,
predicted over measured. What was learned ships nowhere yet: of other sizes on a third H100, and of an H200's
products, networks taught on one machine alone were no better than those that ship.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from fit_calibration import READERS, Ensemble, labels_of, relative, unseen
from numpy.typing import NDArray
from pack_h200 import HELD_OUT, family
from pack_h200 import rows as collected

from tilefit import gpus
from tilefit.cost import calibration
from tilefit.cost.estimate import Estimate
from tilefit.cost.features import features
from tilefit.cost.kernels import select
from tilefit.cost.model import by_stages
from tilefit.cost.priced import as_shipped
from tilefit.cost.transfer import transferred
from tilefit.gpus import Gpu
from tilefit.measure import suites
from tilefit.ops import Op
from tilefit.ops.dtypes import ALIGNMENT_BYTES

DONOR = gpus.get("h200")
DRAWN = {"gemm": suites.gemms, "conv": suites.convs}
ASIDE = 10
#: Where the machine's line is bent.
KNEES_S = (1e-5, 1e-4)
#: A median this much above the least of its calls was disturbed.
DISTURBED = 1.1


@dataclass(frozen=True)
class Plan:
    """How one kind's networks are trained.

    Attributes:
        width, hidden, members: Of new networks; of width 0 those that ship are taught on, so many of each.
        epochs, batch, rate, decay: Of the training.
        said: Weight of a row that the shipped networks say, beside a measured one.
        relative: Share of the relative error in what is minimised, beside that of the logarithm.
    """

    width: int = 0
    hidden: int = 3
    members: int = 1
    epochs: int = 30
    batch: int = 1024
    rate: float = 2e-3
    decay: float = 0.05
    said: float = 0.3
    relative: float = 0.0


@dataclass
class Rows:
    """Operations of a kind with what networks see of them and what they are to say."""

    ops: list[Op]
    x: NDArray[np.float32]
    y: NDArray[np.float32]


@dataclass
class Machine:
    """What one machine measured of a kind: rows, and beside them the times and the shares of the sets."""

    rows: Rows
    found: list[dict[str, str]]
    measured_s: NDArray[np.float64]
    baselines: NDArray[np.float64]
    held_out: NDArray[np.bool_]
    aside: NDArray[np.bool_]
    trend: NDArray[np.float64]
    theirs: list[Estimate]


def read(folder: Path, kind: str) -> list[tuple[Op, dict[str, str]]]:
    """What was measured of a kind, each operation once."""
    found: dict[Op, dict[str, str]] = {}
    for row in collected([folder], kind):
        op = READERS[kind](row)
        if op is not None:
            found.setdefault(op, row)
    return list(found.items())


def undisturbed_s(row: dict[str, str]) -> float:
    """The median of the calls, or the fastest where something else ran meanwhile."""
    time_s, low_s = float(row["us"]) * 1e-6, float(row["low_us"]) * 1e-6
    return low_s if time_s > DISTURBED * low_s else time_s


def described(ops: Sequence[Op]) -> list[tuple[float, list[float]]]:
    return [features[type(op)](op, DONOR) for op in ops]


def carried_back(
    ops: Sequence[Op], measured_s: Sequence[float], gpu: Gpu
) -> tuple[list[float], list[float], list[Estimate]]:
    """For each operation what the donor would take, what its networks say that the GPU takes, and that."""
    donor = as_shipped(DONOR)
    told, back = [], []
    estimates = by_stages(ops, donor)
    for op, theirs, time_s in zip(ops, estimates, measured_s, strict=True):
        told.append(transferred(op, theirs, donor, gpu).time_s)
        theirs_s = first_s = theirs.time_s * time_s / told[-1]
        for _ in range(5):
            found_s = transferred(op, replace(theirs, time_s=theirs_s), donor, gpu).time_s
            if abs(time_s / found_s - 1) < 2e-3:
                break
            # Where memory alone limits a time, the donor's says little.
            theirs_s = min(max(theirs_s * time_s / found_s, 0.8 * first_s), 1.25 * first_s)
        back.append(theirs_s)
    return back, told, estimates


def spread_out(function: Any, *columns: Sequence[Any], processes: int) -> list[Any]:
    """The results of a function of pieces of columns."""
    size = max(1, min(2000, len(columns[0]) // processes + 1))
    pieces = [[column[i : i + size] for column in columns] for i in range(0, len(columns[0]), size)]
    if processes == 1:
        return [function(*piece) for piece in pieces]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.starmap(function, pieces)


def described_rows(ops: list[Op], processes: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    rows = [row for piece in spread_out(described, ops, processes=processes) for row in piece]
    return np.array([row for _, row in rows], dtype=np.float32), np.array([each for each, _ in rows])


def bent(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    log = np.log(times_s)
    return np.column_stack([np.ones_like(log), log, *(np.maximum(0, log - math.log(at)) for at in KNEES_S)])


def machine(folder: Path, kind: str, gpu: Gpu, processes: int) -> Machine:
    """What a machine measured, ready to be learned."""
    pairs = read(folder, kind)
    Random(0).shuffle(pairs)
    ops, found = [op for op, _ in pairs], [row for _, row in pairs]
    groups = [family(kind, row) for row in found]
    divisor, remainder = HELD_OUT
    held = np.array([zlib.crc32(each.encode()) % divisor == remainder for each in groups])
    held |= np.array([unseen(kind, row) for row in found])
    aside = np.array([zlib.crc32(b"calibrate" + each.encode()) % ASIDE == 0 for each in groups]) & ~held
    measured_s = np.array([float(row["us"]) * 1e-6 for row in found])
    learned_s = [undisturbed_s(row) for row in found]
    pieces = spread_out(partial(carried_back, gpu=gpu), ops, learned_s, processes=processes)
    back, told = (np.array([each for piece in pieces for each in piece[i]]) for i in (0, 1))
    theirs = [each for piece in pieces for each in piece[2]]
    x, baselines = described_rows(ops, processes)
    # The machine's own trend, by the median: what it takes over what is said.
    residual, line, weights = np.log(np.array(learned_s) / told), bent(told), np.ones(len(told))
    for _ in range(30):
        root = np.sqrt(weights * ~held)
        factors = np.linalg.lstsq(line * root[:, None], residual * root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(residual - line @ factors), 0.01)
    trend = line @ factors
    at = (2e-6, 1e-5, 1e-4, 1e-3)
    factor = np.exp(bent(np.array(at)) @ factors)
    print(f"{folder.name} {kind}: {len(ops)} rows; it takes", end=" ")
    print(", ".join(f"{f:.3f} at {1e6 * t:g} us" for t, f in zip(at, factor, strict=True)), flush=True)
    y = (np.log(back / baselines) - trend).astype(np.float32)
    return Machine(Rows(ops, x, y), found, measured_s, baselines, held, aside, trend, theirs)


def as_ensemble(network: calibration.Network, copies: int = 1) -> Ensemble:
    """The shipped networks, to be taught on; so many of each."""
    members, inputs, _ = network.layers[0][0].shape
    net = Ensemble(copies * members, [inputs, *(weight.shape[2] for weight, _ in network.layers)])
    with torch.no_grad():
        for index, (weight, bias) in enumerate(network.layers):
            net.weights[index].copy_(torch.from_numpy(weight).repeat(copies, 1, 1))
            net.biases[index].copy_(torch.from_numpy(bias).repeat(copies, 1, 1))
    return net


def labels(network: calibration.Network, kind: str, found: list[dict[str, str]]) -> list[NDArray[np.int64]]:
    """Of products the classes of the kernels' families and tiles; -1 of those without one."""
    if kind != "gemm":
        return []
    names, tiles = labels_of([type("Of", (), {"row": row})() for row in found], 10_000)  # type: ignore[misc]
    classes = []
    for values, known in ((names, network.families), (tiles, network.tiles)):
        place: dict[Any, int] = {value: index for index, value in enumerate(known)}
        other = place.get(None, -1)
        classes.append(np.array([place.get(value, other) for value in values]))
    return classes


def train(
    kind: str,
    plan: Plan,
    network: calibration.Network,
    measured: Rows,
    classes: list[NDArray[np.int64]],
    said: Rows,
    device: str,
    seed: int = 0,
) -> Ensemble:
    """Networks that learn from measured rows, and of others what the shipped networks say."""
    torch.manual_seed(seed)
    x = np.concatenate([measured.x, said.x])
    x = (np.clip(x, network.low, network.high) - network.mean) / network.scale
    inputs = torch.from_numpy(x.astype(np.float32)).to(device)
    with torch.no_grad():
        teacher = as_ensemble(network).to(device)
        told = torch.cat([teacher(part).mean(0) for part in inputs.split(8192)])
    real = torch.zeros(len(x), device=device)
    real[: len(measured.x)] = 1.0
    wanted = torch.cat([torch.from_numpy(measured.y).to(device), torch.from_numpy(said.y).to(device)])
    truth = [torch.full((len(x),), -1, device=device) for _ in classes]
    for each, values in zip(truth, classes, strict=True):
        each[: len(values)] = torch.from_numpy(values).to(device)
    outputs = told.shape[1]
    if plan.width:
        net = Ensemble(plan.members, [x.shape[1], *[plan.width] * plan.hidden, outputs]).to(device)
    else:
        net = as_ensemble(network, plan.members).to(device)
    members, paths = net.weights[0].shape[0], network.paths
    ends = np.cumsum([2, len(network.families), len(network.tiles)]) if classes else []
    batches = len(x) // plan.batch
    optimizer = torch.optim.AdamW(net.parameters(), lr=plan.rate, weight_decay=plan.decay, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.rate, total_steps=plan.epochs * batches, pct_start=0.2
    )
    for epoch in range(plan.epochs):
        order = torch.rand(members, len(x), device=device).argsort(dim=1)
        total = torch.zeros((), device=device)
        for index in range(batches):
            chosen = order[:, index * plan.batch : (index + 1) * plan.batch]
            output = net(inputs[chosen])
            weight = real[chosen] + plan.said * (1 - real[chosen])
            aim = wanted[chosen]
            error = (output[..., 0] - aim).abs()
            log_spread = output[..., 1].clamp(-6, 2)
            kept = 10 * (1 - plan.relative) * error
            if plan.relative:
                kept = kept + 10 * plan.relative * relative(output[..., 0] - aim)
            # The spread is of measured rows alone: of others it is as the shipped networks say.
            near = error.detach() / log_spread.exp() + log_spread
            loss = weight * kept + 0.2 * torch.where(
                real[chosen] > 0, near, (log_spread - told[chosen][..., 1]).abs()
            )
            for (start, end), label in zip(pairwise(ends), truth, strict=True):
                logits = output[..., start:end].log_softmax(-1)
                known = label[chosen]
                hard = -logits.gather(2, known.clamp(min=0)[..., None])[..., 0]
                soft = -(told[chosen][..., start:end].softmax(-1) * logits).sum(-1)
                loss = loss + 0.1 * torch.where(known >= 0, hard, weight * soft)
            if paths:
                logits = output[..., -2 * paths : -paths].log_softmax(-1)
                off = (output[..., -paths:] - aim[..., None]).abs()
                spread = 0.1
                mixture = -(logits - off / spread).logsumexp(-1) * spread
                before = told[chosen]
                chance = before[..., -2 * paths : -paths].softmax(-1)
                soft = -(chance * logits).sum(-1) + 10 * (
                    chance * (output[..., -paths:] - before[..., -paths:]).abs()
                ).sum(-1)
                loss = loss + torch.where(real[chosen] > 0, 10 * mixture, plan.said * soft)
            optimizer.zero_grad()
            loss.mean(dim=1).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0 * members)
            optimizer.step()
            schedule.step()
            total += (error.detach() * real[chosen]).sum() / real[chosen].sum().clamp(min=1)
        if epoch % max(1, plan.epochs // 4) == 0 or epoch == plan.epochs - 1:
            print(f"    epoch {epoch + 1}: {100 * float(total) / batches:.2f} % of measured rows", flush=True)
    return net.cpu()


def as_network(
    net: Ensemble, network: calibration.Network, levels: int = 127
) -> tuple[dict[str, Any], calibration.Network]:
    """The arrays of a file, and the networks as they are read from it."""
    arrays: dict[str, Any] = {name: getattr(network, name) for name in ("low", "high", "mean", "scale")}
    layers = []
    for index, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
        values = weight.detach().numpy()
        step = (np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-8) / levels).astype(np.float32)
        whole = np.round(values / step).astype(np.int8)
        arrays |= {f"weight{index}": whole, f"weight{index}_step": step}
        arrays[f"bias{index}"] = bias.detach().numpy().astype(np.float16)
        layers.append((whole.astype(np.float32) * step, arrays[f"bias{index}"].astype(np.float32)))
    return arrays, replace(network, layers=tuple(layers))


def scored(
    kind: str, of: Machine, network: calibration.Network, gpu: Gpu, where: NDArray[np.bool_]
) -> dict[str, list[float]]:
    """By group the rows, and in per cent: mean and median error of what is carried over to the machine, its
    mean error apart from the machine's line, the share inside the interval; predicted over measured."""
    donor = as_shipped(DONOR)
    index = np.flatnonzero(where)
    outputs = network(of.rows.x[index])
    said = of.baselines[index] * np.exp(outputs[:, 0])
    spreads = np.exp(np.minimum(outputs[:, 1], calibration.WIDEST))
    ops = [of.rows.ops[i] for i in index]
    times = np.array(
        [
            transferred(op, replace(of.theirs[i], time_s=time_s), donor, gpu).time_s
            for op, i, time_s in zip(ops, index, said, strict=True)
        ]
    )
    result = {}
    for name, chosen in split(kind, ops):
        truth = of.measured_s[index][chosen]
        ratio = times[chosen] / truth
        apart = ratio * np.exp(of.trend[index][chosen])
        low, high = (np.exp(q * spreads[chosen]) for q in network.quantiles)
        inside = (ratio * low <= 1) & (ratio * high >= 1)
        told = [
            np.abs(ratio - 1).mean(),
            np.median(np.abs(ratio - 1)),
            np.abs(apart - 1).mean(),
            inside.mean(),
        ]
        result[name] = [
            len(ratio),
            *(round(100 * float(v), 2) for v in told),
            round(float(np.median(ratio)), 3),
        ]
    return result


def split(kind: str, ops: Sequence[Op]) -> list[tuple[str, NDArray[np.bool_]]]:
    every = np.ones(len(ops), dtype=bool)
    if kind == "gemm":
        aligned = np.array([select(op, DONOR).alignment_bytes >= ALIGNMENT_BYTES for op in ops])  # type: ignore[arg-type]
        return [("all", every), ("aligned", aligned), ("misaligned", ~aligned)]
    if kind == "conv":
        one = np.array([op.groups == 1 for op in ops])  # type: ignore[attr-defined]
        deep = np.array([op.is_depthwise for op in ops])  # type: ignore[attr-defined]
        return [("all", every), ("one group", one), ("depthwise", deep), ("grouped", ~one & ~deep)]
    return [("all", every)]


def joined(parts: Sequence[tuple[Machine, NDArray[np.bool_]]]) -> tuple[Rows, list[dict[str, str]]]:
    ops = [of.rows.ops[i] for of, where in parts for i in np.flatnonzero(where)]
    found = [of.found[i] for of, where in parts for i in np.flatnonzero(where)]
    x = np.concatenate([of.rows.x[where] for of, where in parts])
    return Rows(ops, x, np.concatenate([of.rows.y[where] for of, where in parts])), found


def drawn(kind: str, number: int, network: calibration.Network, processes: int) -> Rows:
    """Operations drawn anew, and what the shipped networks say of them."""
    ops = [entry.op for entry in islice(DRAWN[kind](777), number)]
    x, _ = described_rows(ops, processes)
    y = np.concatenate([network(x[i : i + 4096])[:, 0] for i in range(0, len(x), 4096)])
    return Rows(ops, x, y.astype(np.float32))


PLANS = {
    "gemm": {
        "on": Plan(rate=1e-3),
        "on-2": Plan(members=2, rate=2e-3, said=0.2),
        "wide": Plan(width=256, members=4, epochs=50, rate=3e-3, said=0.2),
    },
    "conv": {
        "on": Plan(relative=1.0, decay=0.2, batch=512, epochs=20, rate=1e-3),
        "on-long": Plan(relative=1.0, decay=0.2, batch=512, epochs=30, rate=1e-3, said=0.1),
        "on-more": Plan(relative=1.0, decay=0.5, batch=512, epochs=25, rate=3e-3, said=0.1),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="folders, each of one machine")
    parser.add_argument("--of", default="h100-sxm", help="the GPU that measured them")
    parser.add_argument("--out", type=Path, required=True, help="folder for arrays")
    parser.add_argument("--kinds", nargs="*", default=list(PLANS))
    parser.add_argument("--plans", nargs="*")
    parser.add_argument("--learned", type=int, nargs="+", default=[1], help="from so many of the machines")
    parser.add_argument("--said", type=int, default=150_000, help="operations the shipped networks speak of")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = gpus.get(args.of)
    ships = as_shipped(DONOR).calibration
    assert ships is not None
    results: dict[str, Any] = {}
    began = time.monotonic()
    machines = {
        kind: [machine(folder, kind, gpu, args.processes) for folder in args.rows] for kind in args.kinds
    }
    drawings = {kind: drawn(kind, args.said, ships.networks[kind], args.processes) for kind in args.kinds}
    print(f"read and described in {time.monotonic() - began:.0f} s", flush=True)

    def show(kind: str, label: str, network: calibration.Network, number: int) -> None:
        each = machines[kind][number]
        for where, name in ((each.held_out, "held out"), (each.aside, "aside")):
            told = scored(kind, each, network, gpu, where)
            results[f"{kind} {label}, machine {number}, {name}"] = told
            print(f"  {label}, machine {number}, {name}: {told}", flush=True)
        (args.out / "results.json").write_text(json.dumps(results, indent=1))

    # First from one machine alone, so that the others are machines nothing was learned from; then from all.
    for learned in args.learned:
        for kind, each in machines.items():
            network, said = ships.networks[kind], drawings[kind]
            measured, found = joined([(of, ~of.held_out & ~of.aside) for of in each[:learned]])
            classes = labels(network, kind, found)
            print(f"{kind}: {len(measured.ops)} measured on {learned}, {len(said.ops)} said", flush=True)
            for number in range(len(each)):
                show(kind, "ships", network, number)
            for label, plan in PLANS[kind].items():
                if args.plans and label not in args.plans:
                    continue
                began = time.monotonic()
                net = train(kind, plan, network, measured, classes, said, args.device)
                print(f"  {label}: trained in {time.monotonic() - began:.0f} s", flush=True)
                weights = {
                    f"weight{i}": w.detach().numpy().astype(np.float16) for i, w in enumerate(net.weights)
                }
                weights |= {
                    f"bias{i}": b.detach().numpy().astype(np.float16) for i, b in enumerate(net.biases)
                }
                np.savez_compressed(args.out / f"{kind}-{label}-{learned}.npz", **weights)  # type: ignore[arg-type]
                _, taught = as_network(net, network)
                for number in range(len(each)):
                    show(kind, f"{label}, learned on {learned}", taught, number)


if __name__ == "__main__":
    main()
