"""Fit the shipped calibration of the H200 to what collect_h200.py measured, and record its errors.

    PYTHONPATH=src python benchmarks/fit_calibration.py --data results/h200 \
        --out src/tilefit/cost/data/h200-donor.npz

The test set is that of pack_h200.py: whole families of shapes, so that no test shape has a near neighbour in
the training set. Operations of some models (Llama and Whisper; of convolutions DenseNet and SqueezeNet) are
never trained on either; they are scored apart where nothing else has the same weight. A tenth of the other
families calibrates the intervals. What is fitted is the time with operands cold in L2 (``us``); the ratio of
the warm time to it is recorded.

Each kind has an ensemble of networks of two to four hidden layers, trained on the mean absolute error of the
logarithm (so that being twice too slow and twice too fast weigh alike; of convolutions on the relative error
that is stated, which leans to the fast side), together with the spread of the residual (Laplace's likelihood)
and, for products, the kernel's family and tile.

A convolution's time depends first on the way the library computes it: which kernels, after which copies,
group by group or at once. Each frequent way is a class with a probability and a time of its own. Several
processes collected the convolutions at once and shared the GPU, as repeated measurements show: below 300 us
hardly any is disturbed, beyond 1 ms a third. Where the fastest call took less than the median of its calls
by a tenth, the networks are therefore trained on the fastest; the test set keeps the medians.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from kernels import parse
from numpy.typing import NDArray
from pack_h200 import HELD_OUT, family, kernel_name
from pack_h200 import rows as collected

from tilefit import gpus
from tilefit.cost import calibration
from tilefit.cost.features import domain, features
from tilefit.cost.kernels import select
from tilefit.cost.model import analytic
from tilefit.measure.calibration import as_captured
from tilefit.ops import Attention, Conv, Gemm, Op, Streaming
from tilefit.ops.dtypes import ALIGNMENT_BYTES

GPU = gpus.get("h200")
UNSEEN_MODELS = {"conv": ("densenet121", "squeezenet1_1")}
UNSEEN_BY_DEFAULT = ("llama", "whisper")
MOST_TESTED = 20_000
#: Tiles that are named; the rest are one class that no tile is named for.
TILES = 120
#: An element type or role that was measured less often is not predicted.
LEAST_MEASURED = 30
#: Weight of the error of the path's class, of that of the times.
PATH_WEIGHT = 2.0
#: More kernels than this are a loop over the groups.
LOOPED = 8
#: A median this much above the least of its calls was disturbed by another process.
DISTURBED = 1.1
#: One streaming operation in so many is also learned without its function, which may be an unknown one.
UNNAMED = 9


@dataclass(frozen=True)
class Plan:
    """How one kind is fitted.

    Attributes:
        rows: Most rows that are trained on.
        epochs, width, members, batch: Of the training, the hidden layers, the ensemble.
        classes: Also learn the kernel's family and tile.
        paths: Also learn which of that many ways the library computes it, and the time of each.
        relative: Share of the relative error in what is minimised, beside that of the logarithm.
        calibration: One training family in so many calibrates the intervals.
    """

    rows: int
    epochs: int
    width: int
    members: int
    batch: int
    classes: bool = False
    paths: int = 0
    relative: float = 0.0
    hidden: int = 3
    decay: float = 1e-3
    calibration: int = 10


PLANS = {
    "gemm": Plan(400_000, 16, 224, 1, 1024, classes=True),
    "conv": Plan(400_000, 60, 384, 4, 512, paths=160, relative=1.0, decay=0.2, calibration=20),
    "attention": Plan(100_000, 100, 96, 6, 64, hidden=2, decay=0.1),
    "streaming": Plan(100_000, 60, 128, 4, 256),
}


@dataclass
class Measured:
    """One measured operation."""

    op: Op
    row: dict[str, str]
    held_out: bool
    family: str

    @property
    def time_s(self) -> float:
        return float(self.row["us"]) * 1e-6

    @property
    def undisturbed_s(self) -> float:
        """The median of the calls, or the fastest where another process ran meanwhile."""
        low_s = float(self.row["low_us"]) * 1e-6
        return low_s if self.time_s > DISTURBED * low_s else self.time_s

    @property
    def path(self) -> str:
        """How the library computed it: the kernels that ran, without their types, sizes and tiles."""
        ran = {_stem(name) for name in self.row["all_kernels"].split(";") if not name.startswith("Memset")}
        looped = "looped" if int(self.row["kernels"]) > LOOPED else ""
        return "+".join((_stem(kernel_name(self.row)), *sorted(ran), looped))


def _stem(name: str) -> str:
    return re.split(r"_(?:c?f32|tf32|bf16|f16|s\d{4}|sm90_[a-z]{3}_|\d+x\d)", name)[0][:40]


# --- reading ---------------------------------------------------------------------------------------


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def gemm(row: dict[str, str]) -> Op:
    n = int
    return Gemm(
        n(row["m"]), n(row["n"]), n(row["k"]), row["dtype"], row["layout"], n(row["batch"]),
        ld_a=n(row["ld_a"]), ld_b=n(row["ld_b"]), bias=row["bias"] == "1",
    )  # fmt: skip


def conv(row: dict[str, str]) -> Op | None:
    if row["name"] == "tuned":  # cudnn.benchmark is off unless a program asks for it
        return None
    n = int
    return Conv(
        n(row["batch"]), n(row["in_channels"]), n(row["out_channels"]), _sizes(row["input_size"]),
        _sizes(row["kernel_size"]), _sizes(row["stride"]), _sizes(row["padding"]), _sizes(row["dilation"]),
        n(row["groups"]), row["dtype"], row["channels_last"] == "1", row["direction"],
    )  # fmt: skip


def attention(row: dict[str, str]) -> Op:
    n = int
    return Attention(
        n(row["batch"]), n(row["num_heads"]), n(row["seq_len"]), n(row["head_dim"]), n(row["kv_len"]),
        n(row["num_kv_heads"]), n(row["value_dim"]), row["is_causal"] == "1", n(row["mask_bytes"]),
        float(row["dropout_p"]), row["dtype"], row["direction"],
    )  # fmt: skip


def stream(row: dict[str, str]) -> Op | None:
    return as_captured(row["benchmark"], int(row["rows"]), int(row["inner_size"]), row["dtype"])


def call(row: dict[str, str]) -> Op:
    """A call of a real model, as the step that it was captured from describes it."""
    n = int
    return Streaming(
        row["role"], n(row["elements"]), n(row["read_bytes"]), n(row["write_bytes"]), row["dtype"],
        inner=n(row["inner"]), strided=row["strided"] == "1", kernels=n(row["name"]),
        function=row["function"],
    )  # fmt: skip


#: By the part of the collection.
READERS: dict[str, Callable[[dict[str, str]], Op | None]] = {
    "gemm": gemm,
    "conv": conv,
    "attention": attention,
    "streaming": stream,
    "calls": call,
}


def unseen(kind: str, row: dict[str, str]) -> bool:
    """Whether an operation is of a model that is never trained on."""
    return row["source"].rpartition(":")[2].startswith(UNSEEN_MODELS.get(kind, UNSEEN_BY_DEFAULT))


def read(folder: Path, kind: str) -> list[Measured]:
    """What was measured of a kind, in a random order; of an operation measured twice, the median."""
    divisor, remainder = HELD_OUT
    found: dict[Op, list[Measured]] = {}
    for part in (kind, "calls") if kind == "streaming" else (kind,):
        for row in collected([folder], part):
            op = READERS[part](row)
            if op is None:
                continue
            group = family(part, row)
            held_out = zlib.crc32(group.encode()) % divisor == remainder
            found.setdefault(op, []).append(Measured(op, row, held_out or unseen(kind, row), group))
    measured = [sorted(same, key=lambda each: each.time_s)[len(same) // 2] for same in found.values()]
    Random(0).shuffle(measured)
    return measured


# --- fitting ---------------------------------------------------------------------------------------


class Ensemble(torch.nn.Module):
    """Networks of equal shape, trained side by side on the same batches from different starts."""

    def __init__(self, members: int, sizes: list[int]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.randn(members, a, b) * (2 / a) ** 0.5 for a, b in pairwise(sizes)
        )
        self.biases = torch.nn.ParameterList(torch.zeros(members, 1, b) for b in sizes[1:])
        with torch.no_grad():
            self.weights[-1] *= 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] -> [members, rows, outputs]."""
        x = x.expand(self.weights[0].shape[0], -1, -1)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if index < len(self.weights) - 1:
                x = torch.relu(x)
        return x


def describe(measured: list[Measured]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Inputs, and the logarithm of the baseline."""
    rows = [features[type(each.op)](each.op, GPU) for each in measured]
    return np.array([row for _, row in rows], dtype=np.float32), np.log([baseline for baseline, _ in rows])


def train(
    plan: Plan,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    classes: list[tuple[NDArray[np.int64], int]],
    device: str,
) -> Ensemble:
    """``classes``: the index of each row's class and the number of classes, for each group of outputs.

    With ``plan.paths`` the last outputs are the time of each class of the one group.
    """
    torch.manual_seed(0)
    sizes = [x.shape[1], *[plan.width] * plan.hidden, 2 + sum(number for _, number in classes) + plan.paths]
    net = Ensemble(plan.members, sizes).to(device)
    inputs, times = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    labels = [torch.from_numpy(index).to(device) for index, _ in classes]
    batches = len(x) // plan.batch
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=plan.decay, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=plan.epochs * batches)
    for epoch in range(plan.epochs):
        order, total = torch.randperm(len(x)).to(device), torch.zeros((), device=device)
        for index in range(batches):
            chosen = order[index * plan.batch : (index + 1) * plan.batch]
            with torch.autocast(device, torch.bfloat16, enabled=plan.paths > 0):
                outputs = net(inputs[chosen]).float()
            error = (outputs[..., 0] - times[chosen]).abs()
            log_spread = outputs[..., 1].clamp(-6, 2)
            spread_loss = (error.detach() / log_spread.exp() + log_spread).mean()
            loss = 10 * (1 - plan.relative) * error.mean() + 0.2 * spread_loss
            if plan.relative:
                loss = loss + 10 * plan.relative * relative(outputs[..., 0] - times[chosen]).mean()
            start = 2
            for label, (_, number) in zip(labels, classes, strict=True):
                logits = outputs[..., start : start + number].transpose(1, 2)
                truth = label[chosen].expand(plan.members, -1)
                weight = PATH_WEIGHT if plan.paths else 0.1
                loss = loss + weight * torch.nn.functional.cross_entropy(logits, truth)
                start += number
            if plan.paths:
                of_path = outputs[..., start:].gather(2, truth[..., None])[..., 0]
                loss = loss + 10 * relative(of_path - times[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            total += error.detach().mean()
        if epoch % max(1, plan.epochs // 8) == 0 or epoch == plan.epochs - 1:
            print(f"  epoch {epoch + 1}: training error {100 * float(total) / batches:.2f} %", flush=True)
    return net.cpu()


def relative(error: torch.Tensor) -> torch.Tensor:
    """|predicted / measured - 1| of the error of a logarithm; linear beyond a factor of e^1.5."""
    over, steep = error.clamp(0, 1.5), (error - 1.5).clamp(min=0) * math.exp(1.5)
    return over.exp() - 1 + steep + 1 - error.clamp(max=0).exp()


def labels_of(measured: list[Measured], kept: int) -> tuple[list[str], list[tuple[int, int] | None]]:
    """The family and the tile of the kernel that ran; tiles beyond the most frequent are None."""
    parsed = {name: parse(name) for name in {kernel_name(each.row) for each in measured}}
    found = [parsed[kernel_name(each.row)] for each in measured]
    common = {tile for tile, _ in Counter(k.tile for k in found).most_common(kept)}
    return [k.family for k in found], [k.tile if k.tile in common else None for k in found]


def fit(
    kind: str, plan: Plan, measured: list[Measured], device: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and facts of a kind's networks."""
    pool = [each for each in measured if not each.held_out][: plan.rows]
    if kind == "streaming":  # what a function does that has never been measured: as others of its role
        pool += [replace(each, op=replace(each.op, function="")) for each in pool[::UNNAMED]]
    aside = np.array(
        [zlib.crc32(b"calibrate" + each.family.encode()) % plan.calibration == 0 for each in pool]
    )
    began = time.monotonic()
    x, log_baseline = describe(pool)
    y = (np.log([each.time_s for each in pool]) - log_baseline).astype(np.float32)
    learned = y
    if plan.paths:
        learned = (np.log([each.undisturbed_s for each in pool]) - log_baseline).astype(np.float32)
    print(f"{kind}: {len(pool)} rows described in {time.monotonic() - began:.0f} s", flush=True)
    low, high = x[~aside].min(axis=0), x[~aside].max(axis=0)
    mean = x[~aside].mean(axis=0)
    scale = np.maximum(x[~aside].std(axis=0), 1e-2).astype(np.float32)
    classes, families, tiles = [], [], []
    if plan.classes:
        names, sizes = labels_of(pool, TILES)
        families = sorted(set(names))
        tiles = sorted(set(sizes), key=str)
        for values, known in ((names, families), (sizes, tiles)):
            place = {value: index for index, value in enumerate(known)}
            classes.append((np.array([place[value] for value in values])[~aside], len(known)))
    if plan.paths:  # the last is all rarer ones
        names = [each.path for each in pool]
        place = {name: i for i, (name, _) in enumerate(Counter(names).most_common(plan.paths - 1))}
        classes.append((np.array([place.get(n, plan.paths - 1) for n in names])[~aside], plan.paths))
    net = train(plan, (x[~aside] - mean) / scale, learned[~aside], classes, device)
    arrays: dict[str, Any] = {"low": low, "high": high, "mean": mean, "scale": scale}
    for index, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
        values = weight.detach().numpy()
        if plan.paths:  # one byte a weight, one step of it for each output
            step = np.abs(values).max(axis=1, keepdims=True) / 127
            arrays[f"weight{index}"] = np.round(values / step).astype(np.int8)
            arrays[f"weight{index}_step"] = step
        else:
            arrays[f"weight{index}"] = values.astype(np.float16)
        arrays[f"bias{index}"] = bias.detach().numpy().astype(np.float16)
    counts = Counter(domain(each.op) for each in pool)
    facts: dict[str, Any] = {
        "domains": sorted(name for name, number in counts.items() if number >= LEAST_MEASURED),
        "layers": len(net.weights),
        "quantiles": [0.0, 0.0],
        "families": families,
        "tiles": tiles,
        "paths": plan.paths,
        "fingerprint": calibration.fingerprint(kind, GPU),
        "trained_rows": int((~aside).sum()),
    }
    network = calibration.network({f"{kind}/{key}": value for key, value in arrays.items()}, kind, facts)
    outputs = network(x[aside])
    residual = (y[aside] - outputs[:, 0]) / np.exp(outputs[:, 1])
    facts["quantiles"] = [round(float(q), 4) for q in np.quantile(residual, (0.1, 0.9))]
    print(f"{kind}: fitted in {time.monotonic() - began:.0f} s", flush=True)
    return arrays, facts


# --- scoring ---------------------------------------------------------------------------------------


def errors(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> dict[str, float]:
    relative = 100 * np.abs(predicted / measured - 1)
    return {
        "rows": len(relative),
        "mape": round(float(relative.mean()), 2),
        "median": round(float(np.median(relative)), 2),
        "p90": round(float(np.quantile(relative, 0.9)), 2),
    }


def groups(kind: str, tested: list[Measured], trained: set[str]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    def where(condition: Callable[[Measured], bool]) -> NDArray[np.bool_]:
        return np.array([condition(each) for each in tested])

    yield "all", where(lambda each: True)
    columns = {
        "gemm": ("dtype", "layout"),
        "conv": ("dtype", "direction", "channels_last"),
        "attention": ("dtype", "direction"),
        "streaming": ("dtype",),
    }[kind]
    if kind == "gemm":
        aligned = where(lambda each: select(each.op, GPU).alignment_bytes >= ALIGNMENT_BYTES)  # type: ignore[arg-type]
        yield "aligned", aligned
        yield "misaligned", ~aligned
    if kind == "conv":
        yield "one group", where(lambda each: each.row["groups"] == "1")
        yield "groups or depthwise", where(lambda each: each.row["groups"] != "1")
    if kind == "streaming":
        for role in sorted({each.op.role for each in tested if isinstance(each.op, Streaming)}):
            yield f"role {role}", where(lambda each, role=role: each.op.role == role)  # type: ignore[misc,attr-defined]
        for name in sorted({each.op.function for each in tested if isinstance(each.op, Streaming)}):
            yield f"function {name}", where(lambda each, name=name: each.op.function == name)  # type: ignore[misc,attr-defined]
    for column in columns:
        for value in sorted({each.row[column] for each in tested}):
            yield f"{column} {value}", where(lambda each, c=column, v=value: each.row[c] == v)  # type: ignore[misc]
    yield "real models", where(lambda each: not each.row["source"].startswith(("grid", "stream")))
    new = where(lambda each: unseen(kind, each.row) and shape(each) not in trained)
    yield "models and weights never seen", new
    bands = (0, 5, 20, 100, 1000, float("inf"))
    for low, high in pairwise(bands):
        yield f"{low:g} to {high:g} us", where(lambda each, lo=low, hi=high: lo <= each.time_s * 1e6 < hi)  # type: ignore[misc]


def shape(each: Measured) -> str:
    """The sizes of the weight, and of a product which operand is transposed."""
    keys = ("n", "k", "layout", "in_channels", "out_channels", "kernel_size")
    return "/".join(each.row.get(key, "") for key in keys)


def score(kind: str, measured: list[Measured], own: calibration.Calibration) -> dict[str, Any]:
    tested = [each for each in measured if each.held_out and own.covers(each.op)][:MOST_TESTED]
    trained = {shape(each) for each in measured if not each.held_out}
    first = [analytic(each.op, GPU) for each in tested]
    second = own.correct([each.op for each in tested], GPU, first)
    truth = np.array([each.time_s for each in tested])
    stages = {
        "calibrated": np.array([e.time_s for e in second]),
        "analytic": np.array([e.time_s for e in first]),
        "roofline": np.array(
            [
                max(
                    each.op.flop / GPU.peak_flop_per_s(each.op.dtype),
                    each.op.moved_bytes / GPU.memory_bandwidth_bytes_per_s,
                )
                for each in tested
            ]
        ),
    }
    held = [e.low_s <= t <= e.high_s for e, t in zip(second, truth, strict=True)]
    held_first = [e.low_s <= t <= e.high_s for e, t in zip(first, truth, strict=True)]
    result: dict[str, Any] = {
        "coverage_of_80_percent_interval": round(float(np.mean(held)), 4),
        "interval_width_median": round(
            float(np.median([(e.high_s - e.low_s) / e.time_s for e in second])), 4
        ),
        "analytic_coverage": round(float(np.mean(held_first)), 4),
        "groups": {},
    }
    for name, chosen in groups(kind, tested, trained):
        if chosen.sum() >= 5:
            result["groups"][name] = {
                stage: errors(times[chosen], truth[chosen]) for stage, times in stages.items()
            } | {"coverage": round(float(np.mean(np.array(held)[chosen])), 4)}
    warm = [float(each.row["warm_us"]) / float(each.row["us"]) for each in tested if each.row.get("warm_us")]
    if warm:
        result["warm_over_cold"] = [round(float(q), 3) for q in np.quantile(warm, (0.1, 0.5, 0.9))]
    if kind == "gemm":
        result |= agreement(tested, first, second)
    return result


def agreement(tested: list[Measured], first: list[Any], second: list[Any]) -> dict[str, Any]:
    """How often the named family and tile are those of the kernel that ran."""
    names, tiles = labels_of(tested, 10_000)
    tiled = [i for i, tile in enumerate(tiles) if tile is not None]
    sure = [i for i in tiled if second[i].tile is not None]
    fast = {"sm90", "sm100"}
    return {
        "family_agreement": round(
            float(np.mean([e.kernel_family == name for e, name in zip(second, names, strict=True)])), 4
        ),
        "hopper_path_agreement": round(
            float(
                np.mean(
                    [
                        (e.kernel_family in fast) == (name in fast)
                        for e, name in zip(second, names, strict=True)
                    ]
                )
            ),
            4,
        ),
        "analytic_family_agreement": round(
            float(np.mean([e.kernel_family == name for e, name in zip(first, names, strict=True)])), 4
        ),
        "tile_agreement_where_named": round(float(np.mean([second[i].tile == tiles[i] for i in sure])), 4),
        "tile_named_share": round(len(sure) / len(tiled), 4),
        "analytic_tile_agreement": round(float(np.mean([first[i].tile == tiles[i] for i in tiled])), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of collect_h200.py's files")
    parser.add_argument("--out", type=Path, required=True, help="the calibration to write")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "fit_h200.json")
    parser.add_argument("--kinds", nargs="*", default=list(PLANS), choices=list(PLANS), help="fit only these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {"gpu": GPU.name, "networks": {}}
    results: dict[str, Any] = {}
    if args.out.exists():  # keep the kinds that are not fitted again
        with np.load(args.out) as old:
            arrays = {key: old[key] for key in old.files if key != "about"}
            about = json.loads(str(old["about"]))
        results = json.loads(args.results.read_text())["kinds"] if args.results.exists() else {}
    runs = [json.loads(path.read_text()) for path in sorted(args.data.glob("*-*.json"))]
    about["collected"] = sorted({run["date"][:10] for run in runs if isinstance(run, dict) and "date" in run})
    about["versions"] = {key: runs[0][key] for key in ("torch", "cuda", "cudnn", "driver")}
    for kind in args.kinds:
        measured = read(args.data, kind)
        found, facts = fit(kind, PLANS[kind], measured, args.device)
        arrays = {key: value for key, value in arrays.items() if not key.startswith(f"{kind}/")}
        arrays |= {f"{kind}/{key}": value for key, value in found.items()}
        about["networks"][kind] = facts
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("wb") as file:
            np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
        results[kind] = {"measured": len(measured), "trained_on": facts["trained_rows"]} | score(
            kind, measured, calibration.read(args.out)
        )
        print(kind, json.dumps({k: v for k, v in results[kind].items() if k != "groups"}))
        for name, stages in results[kind]["groups"].items():
            c, a, r = stages["calibrated"], stages["analytic"], stages["roofline"]
            print(
                f"  {name:32s} {c['rows']:6d} rows: {c['mape']:6.2f} / {c['median']:6.2f} / {c['p90']:6.2f} %"
                f"  (analytic {a['mape']:6.1f}, roofline {r['mape']:6.1f})  held {stages['coverage']:.2f}"
            )
        summary = {"calibration_bytes": args.out.stat().st_size, "about": about | {"networks": None}}
        args.results.write_text(json.dumps(summary | {"kinds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
