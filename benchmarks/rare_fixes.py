"""What fixes are worth that no measured model has, on models made for them.

    python benchmarks/rare_fixes.py --predict                     # no GPU: what a step would take
    python benchmarks/rare_fixes.py --out OUT.json                # on a CUDA GPU: predicted and measured
    python benchmarks/rare_fixes.py --only "unet, compiled" --variant fixed     # one variant in this process

Each model has a plan of one fix alone, and its step is timed without and with it, in turn. The recorded rows,
of the commit that added this script, have more: cases of the fixes time-steps and pad-rows, which are gone,
and ``less``: pad-channels that knows nothing of concatenations or of depthwise convolutions, as it does now.
Those under ``alone`` were measured in a process each, while pad-channels still went through depthwise
convolutions: compiled in one process, the second variant had sizes that change, and took 86 ms where 35 are
right.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilefit
from tilefit.fixes.changes.fix import applied
from tilefit.fixes.changes.run import Run
from tilefit.fixes.planning.measuring import RunningStep, each_compiled_anew
from tilefit.options import StepOptions

ROUNDS = 9
VARIANTS = ("plain", "fixed")


def norm_relu_conv(into: int, out: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(into), nn.ReLU(), nn.Conv2d(into, out, size, padding=size // 2, bias=False)
    )


class Dense(nn.Module):
    """A DenseNet-BC for small images, with the growth of 12 that its paper uses for these."""

    def __init__(self, growth: int = 12, depth: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)
        self.blocks, self.between, channels = nn.ModuleList(), nn.ModuleList(), 2 * growth
        for _ in range(3):
            layers = nn.ModuleList()
            for _ in range(depth):
                layers.append(
                    nn.Sequential(
                        norm_relu_conv(channels, 4 * growth, 1), norm_relu_conv(4 * growth, growth, 3)
                    )
                )
                channels += growth
            self.blocks.append(layers)
            self.between.append(nn.Sequential(norm_relu_conv(channels, channels // 2, 1), nn.AvgPool2d(2)))
            channels //= 2
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layers, between in zip(self.blocks, self.between, strict=True):
            for layer in layers:
                x = torch.cat((x, layer(x)), 1)
            x = between(x)
        return self.head(x.mean((2, 3)))


def conv_norm_relu(into: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (into, out):
        layers += [
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """With odd numbers of channels."""

    def __init__(self, sizes: tuple[int, ...] = (30, 60, 122, 244)) -> None:
        super().__init__()
        self.down = nn.ModuleList(conv_norm_relu(a, b) for a, b in zip((3, *sizes), sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(sizes))
        self.merged = nn.ModuleList(conv_norm_relu(2 * a, a) for a in sizes[:-1])
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(sizes[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, down in enumerate(self.down):
            x = down(self.pool(x) if number else x)
            kept.append(x)
        kept.pop()
        for up, merged in zip(reversed(self.up), reversed(self.merged), strict=True):
            x = merged(torch.cat((kept.pop(), up(x)), 1))
        return self.head(x)


class Separable(nn.Module):
    """Inverted residuals with odd numbers of channels, depthwise in the middle."""

    def __init__(self, channels: int = 36, times: int = 3, depth: int = 8) -> None:
        super().__init__()
        wide = channels * times + 2
        self.first = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
                *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide)),
                *(nn.ReLU6(), nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)),
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


#: The model, its input's sizes, the fix, and options.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, dict[str, Any]]] = {
    "dense": (Dense, (256, 3, 32, 32), "pad-channels", {}),
    "dense, compiled": (Dense, (256, 3, 32, 32), "pad-channels", {"compile": True}),
    "unet": (UNet, (16, 3, 256, 256), "pad-channels", {}),
    "unet, compiled": (UNet, (16, 3, 256, 256), "pad-channels", {"compile": True}),
    "separable": (Separable, (64, 3, 224, 224), "pad-channels", {}),
    "separable, compiled": (Separable, (64, 3, 224, 224), "pad-channels", {"compile": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--predict", action="store_true", help="no GPU: predictions alone")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--variant", choices=VARIANTS, help="this one alone")
    parser.add_argument("--budget-s", type=float, default=360.0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    start, rows = time.monotonic(), []
    for name in args.only or CASES:
        if time.monotonic() - start > args.budget_s:
            break
        variants = [args.variant] if args.variant else VARIANTS
        row = one(name, args.gpu, variants, predict=args.predict)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            about = (
                {} if args.predict else {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            )
            args.out.write_text(json.dumps({"gpu": args.gpu, **about, "rows": rows}, indent=1) + "\n")


def one(name: str, gpu: str, variants: Sequence[str], *, predict: bool) -> dict[str, Any]:
    """A case: what a step takes as it is, and with the fix."""
    make, sizes, fix, options = CASES[name]
    torch.manual_seed(0)
    model, device = make(), "meta" if predict else "cuda"
    inputs = torch.empty(sizes, device="meta") if predict else torch.randn(sizes, device="cuda")
    row: dict[str, Any] = {"name": name, "fix": fix}
    steps: dict[str, tuple[Any, RunningStep]] = {}
    for variant in variants:
        own = copy.deepcopy(model).to(device)
        run = Run(own, inputs, StepOptions(amp="bf16", **options))
        changes: tuple[Any, ...] = ()
        if variant != "plain":
            # Beside the layout that convolutions get first.
            chosen = [fix, *(["channels-last"] if fix == "pad-channels" else [])]
            plan = tilefit.optimize(own, inputs, gpu=gpu, select=chosen, verify=False, amp="bf16", **options)
            changes = plan.candidates
            row[f"{variant}_fixes"] = {each.name: round(1e3 * each.gain_s, 4) for each in plan.fixes}
            row["predicted_plain_ms"] = round(1e3 * plan.before_s, 4)
            row[f"predicted_{variant}_ms"] = round(1e3 * plan.after_s, 4)
            plan.undo()
        if not predict:
            steps[variant] = applied(run, changes), run
    if predict:
        return row
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    running = {}
    with each_compiled_anew():
        for variant, (change, run) in steps.items():
            change.__enter__()
            running[variant] = RunningStep(run)
            running[variant].fill(0.15, 50, time.perf_counter)
        for number in range(ROUNDS):
            for variant in times if number % 2 == 0 else reversed(times):
                times[variant].append(running[variant].timed_s(time.perf_counter))
        for change, _ in steps.values():
            change.__exit__(None, None, None)
    for variant, found in times.items():
        row[f"measured_{variant}_ms"] = round(1e3 * statistics.median(found), 4)
        row[f"rounds_{variant}_ms"] = [round(1e3 * each, 4) for each in found]
    return row


if __name__ == "__main__":
    main()
