"""Fit the networks that ship for a GPU on top of a donor's: an H100's and an H200's, which correct what the
networks of a first H200 (``data/h200-donor.npz``) say.

    PYTHONPATH=src python benchmarks/ship_calibration.py --device cuda --date 2026-11-26 --kinds gemm conv \
        --taught benchmarks/results/rows_{sixth,eighth}_h100 --seen benchmarks/results/rows_seventh_h100 \
        --out src/tilefit/cost/data/h100-sxm.npz
    PYTHONPATH=src python benchmarks/ship_calibration.py --device cuda --date 2026-11-27 --kinds gemm \
        --taught benchmarks/results/rows_{second_h200,sixth_h100,eighth_h100} \
        --out src/tilefit/cost/data/h200.npz
    PYTHONPATH=src python benchmarks/ship_calibration.py --date 2026-11-27 --kinds conv streaming \
        --taught benchmarks/results/rows_second_h200 --out src/tilefit/cost/data/h200.npz

The rows are what ``collect_together.py`` wrote, each folder of one machine: what kernels take by the
profiler. Families of shapes that ``pack_h200.py`` holds out, and layers of models that are never trained on,
are scored and not fitted to, nor is a tenth of the others; both set the intervals, and decide which element
types and roles are left to the donor: those of machines of the file's GPU. The machines that are SEEN teach
nothing. The constants of the first stage, and kinds that are not named, stay those of the file. ``--widths``
sets intervals anew, nothing else: those of an H100's convolutions so, apart of depthwise and of grouped ones;
of the seventh 84 % of those of one group are inside, 80 and 87 of the others (before 86, 91, 78), of families
held out 76, 76, 71. Its other kinds' are of the tenth alone, at 10 and 90 %.

Networks of products see how wide the donor's interval is. It became narrower by a factor of 1.03 on both
sides after an H100's were taught: what this input is measured from was moved by as much.

Products and convolutions of an H100 ship so. Of the seventh H100, all rows and the families held out,
misaligned products go from 8.6 to 7.8 and from 8.7 to 7.7 % off, aligned ones from 6.0 to 4.7 and from 5.7 to
4.6, convolutions from 11.4 to 10.4 and from 11.6 to 10.9. The plans were chosen among 22 by what the sixth
and the eighth held out; what they are off on the seventh was printed beside.

Of memory-bound operations an H100 has those that an earlier version of this script taught on the sixth and
the seventh, of one network of 64 units. What it makes now, of the sixth alone, is 7.7 % off on families of
the seventh, where those were 7.9; but whole steps come out 0.7 % shorter, and further off (90 on H100s: 2.0 %
in the median, with what ships 1.5; so they were chosen on these steps).

Networks of products see what ``tilefit.cost.features.divided`` tells: without it misaligned ones are 8.0 to
8.1 % off on the seventh, with few rows or splits alone 7.9 to 8.0. Convolutions gain nothing from the like,
nor from wider networks; grouped ones (28 % off, 22 to 30 on families held out) nothing at all.

An H200's were chosen among 34 of products, 13 of convolutions and 7 of memory-bound operations by what the
second H200 held out, families and the tenth. Misaligned products go from 8.8 to 7.8 % off there, aligned ones
from 4.9 to 4.7; taught by the second H200 alone, without H100s, which choose among the same kernels, to 8.4
and 4.8; without seeing what the first H200's networks say of the kernel to 8.0 and 4.7. Twice the epochs or
192 units gain up to 0.1 of this. What is trained on the relative error made whole steps 1 % shorter, since of
the least such error are times that are short: so products are balanced, and memory-bound operations trained
on the logarithm (9.7 to 8.8 %; on the relative error 8.6), chosen with the H200's recorded steps in sight.
Convolutions gain next to nothing (12.0 to 11.9 %); what ships of them sets their intervals. Products were
trained on a GPU; on a CPU the same command makes others, as far off on a third H200 (7.7 and 4.6 %).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compress_calibration import compress, whole
from fit_calibration import DISTURBED, READERS, Ensemble, relative, unseen
from numpy.typing import NDArray
from other_machine import group
from pack_h200 import HELD_OUT, family
from pack_h200 import rows as collected

from tilefit import gpus
from tilefit.cost.calibration import WIDEST, Network, fingerprint, network, on_analytic
from tilefit.cost.features import apart, domain
from tilefit.cost.model import by_stages
from tilefit.cost.priced import basis, left_out
from tilefit.cost.streaming import traffic
from tilefit.ops import Op

ASIDE = 10
#: Where the intervals end, of families that were not taught: they hold 78 % of these, since most rows of a
#: further machine are of families that were, and 80 % of all are to be inside.
TAILS = (0.11, 0.89)
#: The same where all rows count, of which a little was learnt.
TAILS_OF_ALL = (0.09, 0.91)
#: A domain that was measured less often is not corrected.
LEAST_MEASURED = 30
#: Operations that are described at a time.
PIECE = 1000


@dataclass(frozen=True)
class Plan:
    """How a kind's networks are trained.

    Attributes:
        relative: The share of the relative error in what is minimised, beside that of the logarithm.
        balanced: What they say is multiplied so that times of what was not taught add up to what was
            measured: of the least relative error are times that are somewhat short.
        of_all: Intervals are set by all rows: those of networks that learn next to nothing.
    """

    width: int
    members: int
    epochs: int
    batch: int
    decay: float
    relative: float
    hidden: int = 2
    divided: bool = False
    balanced: bool = False
    of_all: bool = False


#: By what ships, chosen on the held-out families of the machines that are taught.
PLANS = {
    "h100-sxm": {
        "gemm": Plan(128, 3, 60, 1024, 0.1, 1.0, divided=True),
        "conv": Plan(96, 4, 24, 256, 0.5, 1.0),
        "streaming": Plan(48, 4, 40, 128, 0.3, 1.0),
    },
    "h200": {
        "gemm": Plan(128, 3, 60, 1024, 0.1, 1.0, divided=True, balanced=True),
        "conv": Plan(32, 2, 12, 256, 1.0, 1.0, of_all=True),
        "streaming": Plan(24, 2, 40, 128, 0.3, 0.0),
    },
}


KINDS = [*PLANS["h200"]]


@dataclass
class Rows:
    """One machine's: what the networks see and are to say, the time before correction, and the sets."""

    name: str
    gpu: gpus.Gpu
    ops: list[Op]
    x: NDArray[np.float32]
    before_s: NDArray[np.float64]
    measured_s: NDArray[np.float64]
    learned_s: NDArray[np.float64]
    held_out: NDArray[np.bool_]
    aside: NDArray[np.bool_]

    @property
    def domains(self) -> NDArray[np.str_]:
        return np.array([domain(op) for op in self.ops])

    @property
    def apart(self) -> NDArray[np.str_]:
        return np.array([apart(op, self.gpu) for op in self.ops])

    @property
    def taught(self) -> NDArray[np.bool_]:
        return ~self.held_out & ~self.aside

    def off(self, of: NDArray[np.float64]) -> NDArray[np.float32]:
        """What a correction would be exact with."""
        found: NDArray[np.float32] = np.log(of / self.before_s).astype(np.float32)
        return found


def described(
    ops: list[Op], gpu: gpus.Gpu, in_parts: bool
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    before = left_out(gpu)
    return on_analytic(ops, before, by_stages(ops, before), in_parts)


def read(path: Path, kind: str, in_parts: bool) -> Rows:
    """What a machine measured of a kind, each operation once; the folder's name ends with its GPU's."""
    gpu = gpus.get(path.name.rpartition("_")[2])
    found: dict[Op, dict[str, str]] = {}
    for row in collected([path], kind):
        op = READERS[kind](row)
        if op is not None:
            found.setdefault(op, row)
    ops, rows = [traffic(op) for op in found], list(found.values())
    groups = [family(kind, row).encode() for row in rows]
    divisor, remainder = HELD_OUT
    held = np.array([zlib.crc32(each) % divisor == remainder for each in groups], dtype=bool)
    held |= np.array([unseen(kind, row) for row in rows], dtype=bool)
    aside = np.array([zlib.crc32(b"calibrate" + each) % ASIDE == 0 for each in groups], dtype=bool) & ~held
    pieces = [(ops[i : i + PIECE], gpu, in_parts) for i in range(0, len(ops), PIECE)]
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        first, x = (np.concatenate(each) for each in zip(*pool.starmap(described, pieces, 1), strict=True))
    median_s, low_s = (np.array([float(row[name]) for row in rows]) * 1e-6 for name in ("us", "low_us"))
    learned_s = np.where(median_s > DISTURBED * low_s, low_s, median_s)
    return Rows(path.name, gpu, ops, x, first, median_s, learned_s, held, aside)


def fitted(x: NDArray[np.float32], y: NDArray[np.float32], plan: Plan, device: str) -> dict[str, Any]:
    """Arrays of networks of the logarithm of what is to be corrected, and of the spread of their error; the
    weights in whole steps."""
    torch.manual_seed(0)
    arrays: dict[str, Any] = {"low": x.min(axis=0), "high": x.max(axis=0), "mean": x.mean(axis=0)}
    arrays["scale"] = np.maximum(x.std(axis=0), 1e-2)
    net = Ensemble(plan.members, [x.shape[1], *[plan.width] * plan.hidden, 2]).to(device)
    inputs = torch.from_numpy((x - arrays["mean"]) / arrays["scale"]).to(device)
    truth = torch.from_numpy(y).to(device)
    batches = len(x) // plan.batch
    groups = [
        {"params": list(net.weights), "weight_decay": plan.decay},
        {"params": list(net.biases), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=plan.epochs * batches, pct_start=0.15
    )
    for _ in range(plan.epochs):
        order = torch.rand(plan.members, len(x), device=device).argsort(dim=1)
        for chosen in order[:, : batches * plan.batch].split(plan.batch, dim=1):
            outputs = net(inputs[chosen])
            off = outputs[..., 0] - truth[chosen]
            log_spread = outputs[..., 1].clamp(-6, WIDEST)
            loss = plan.relative * relative(off) + (1 - plan.relative) * off.abs()
            loss = loss + 0.02 * (off.detach().abs() / log_spread.exp() + log_spread)
            optimizer.zero_grad()
            loss.mean(dim=1).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), plan.members)
            optimizer.step()
            schedule.step()
    for index, (weights, biases) in enumerate(zip(net.weights, net.biases, strict=True)):
        values = whole(weights.detach().cpu().numpy())
        arrays[f"weight{index}"], arrays[f"weight{index}_step"] = values
        arrays[f"bias{index}"] = biases.detach().cpu().numpy().astype(np.float16)
    return arrays


def corrections(net: Network, of: Rows) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
    """What networks say of the logarithm of the correction, their spread, and where they speak."""
    outputs = net(of.x)
    speak = np.isin(of.domains, list(net.domains))
    return np.where(speak, outputs[:, 0], 0.0), np.exp(np.minimum(outputs[:, 1], WIDEST)), speak


def widths(net: Network, machines: Sequence[Rows], of_all: bool) -> dict[str, Any]:
    """Quantiles of the errors of what was not taught, or of all, over the spreads; and those of what is told
    apart."""
    residuals, names = [], []
    for each in machines:
        said, spread, _ = corrections(net, each)
        counted = of_all | ~each.taught
        residuals.append(((each.off(each.measured_s) - said) / spread)[counted])
        names.append(each.apart[counted])
    kinds, tails = np.concatenate(names), TAILS_OF_ALL if of_all else TAILS
    found = {
        name: [round(float(q), 4) for q in np.quantile(np.concatenate(residuals)[kinds == name], tails)]
        for name in sorted(set(kinds))
    }
    return {"quantiles": found.pop(""), "apart": found}


def balance(arrays: dict[str, Any], kind: str, facts: dict[str, Any], own: Sequence[Rows]) -> None:
    """Multiply what networks say, by the bias of their last layer."""
    net = network(arrays, kind, facts)
    said_s = sum((each.before_s * np.exp(corrections(net, each)[0]))[~each.taught].sum() for each in own)
    measured_s = sum(each.measured_s[~each.taught].sum() for each in own)
    bias = arrays[f"{kind}/bias{facts['layers'] - 1}"]
    bias[..., 0] += np.log(measured_s / said_s)


def learn(
    kind: str, plan: Plan, machines: Sequence[Rows], own: Sequence[Rows], device: str
) -> tuple[dict[str, Any], dict[str, Any], Network]:
    """Networks of a kind: their arrays, their facts, and as they are read from a file. What machines of the
    GPU itself were not taught sets the intervals."""
    x = np.concatenate([each.x[each.taught] for each in machines])
    y = np.concatenate([each.off(each.learned_s)[each.taught] for each in machines])
    arrays = {f"{kind}/{name}": values for name, values in fitted(x, y, plan, device).items()}
    seen = np.concatenate([each.domains for each in own])
    facts: dict[str, Any] = {
        "domains": sorted(set(seen)),
        "layers": plan.hidden + 1,
        "quantiles": [0.0, 0.0],
        "families": [],
        "tiles": [],
        "on_analytic": True,
        "bounds": [float(y.min()), float(y.max())],
        "divided": plan.divided,
    }
    if plan.balanced:
        balance(arrays, kind, facts, own)
    said = [corrections(network(arrays, kind, facts), each)[0] for each in own]
    truth = [each.off(each.measured_s) for each in own]
    facts |= widths(network(arrays, kind, facts), own, plan.of_all)
    # What was not taught decides which domains are left to the donor.
    untaught = ~np.concatenate([each.taught for each in own])
    before = np.abs(np.exp(-np.concatenate(truth)) - 1)
    after = np.abs(np.exp(np.concatenate(said) - np.concatenate(truth)) - 1)
    for name in set(seen):
        chosen = untaught & (seen == name)
        if chosen.sum() < LEAST_MEASURED or after[chosen].mean() >= before[chosen].mean():
            facts["domains"].remove(name)
    return arrays, facts, network(arrays, kind, facts)


def show(of: Rows, net: Network, where: NDArray[np.bool_], label: str) -> tuple[float, float]:
    """Errors before and after, by group and of all."""
    truth = of.off(of.measured_s)
    said, spread, speak = corrections(net, of)
    lower, upper = np.array([net.apart.get(name, net.quantiles) for name in of.apart]).T
    inside = (truth - said >= lower * spread) & (truth - said <= upper * spread)
    before, after = (np.abs(np.exp(each - truth) - 1) for each in (np.zeros_like(truth), said))
    groups = np.array([group(op, gpus.get("h200")) for op in of.ops])
    if "," not in groups[0]:
        groups = np.array([f"{name}, {each}" for name, each in zip(groups, of.domains, strict=True)])
    for name in sorted({*groups[where], ""}):
        chosen = where & ((groups == name) | (not name))
        print(
            f"  {of.name}, {label}: {name or 'all':40} {chosen.sum():6}: off {before[chosen].mean():5.1%}, "
            f"then {after[chosen].mean():5.1%}; {inside[chosen & speak].mean():.0%} inside",
            flush=True,
        )
    return float(before[where].mean()), float(after[where].mean())


def kept(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of a file that ships, and what it says of itself; of a new one none, and the GPU of its name."""
    if not path.exists():
        return {}, {"gpu": path.stem, "networks": {}}
    with np.load(path) as old:
        arrays = {name: old[name] for name in old.files if name != "about"}
        return arrays, json.loads(str(old["about"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--taught", type=Path, nargs="+", required=True, help="folders, each of one machine")
    parser.add_argument("--seen", type=Path, nargs="*", default=[], help="folders that are scored alone")
    parser.add_argument("--out", type=Path, required=True, help="the file that ships, which is written anew")
    parser.add_argument("--date", required=True, help="of the last measurement")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="that ship")
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda")
    parser.add_argument("--widths", action="store_true", help="of the file's networks, the intervals alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file, about = kept(args.out)
    arrays = {name: file[name] for name in file if name.partition("/")[0] not in args.kinds}
    gpu = gpus.get(about["gpu"])
    for kind in args.kinds:
        plan = PLANS[gpu.name][kind]
        machines = [read(path, kind, plan.divided) for path in args.taught if any(path.glob(f"{kind}-*"))]
        own = [each for each in machines if each.gpu == gpu]
        if args.widths:
            found = {name: values for name, values in file.items() if name.startswith(f"{kind}/")}
            facts = about["networks"][kind]
            facts |= widths(network(file, kind, facts), own, plan.of_all)
            net = network(file, kind, facts)
        else:
            found, facts, net = learn(kind, plan, machines, own, args.device)
        told = [show(each, net, each.held_out, "held out") for each in own]
        for each in machines:
            show(each, net, ~each.taught, "not taught")
        for path in args.seen:
            each = read(path, kind, plan.divided)
            show(each, net, each.held_out, "seen alone, held out")
            show(each, net, np.ones_like(each.held_out), "seen alone")
        facts |= {
            "fingerprint": fingerprint(kind, gpu, True, plan.divided),
            "trained_rows": int(sum(each.taught.sum() for each in machines)),
            "held_out_rows": int(sum(each.held_out.sum() for each in own)),
            "errors": {
                "shipped": round(float(np.mean([before for before, _ in told])), 4),
                "calibrated": round(float(np.mean([after for _, after in told])), 4),
            },
        }
        arrays |= found
        about["networks"][kind] = facts
    about |= {"collected": [args.date], "date": args.date, "on": basis(left_out(gpu))}
    with args.out.open("wb") as written:
        np.savez_compressed(written, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
    compress(args.out)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
