"""Measure whole training steps of real models on a GPU, beside tilefit's prediction.

Each model runs eager training steps under bf16 autocast with AdamW (PyTorch's defaults otherwise). The models
are measured one after another, several times over: what else runs on the host makes steps slower for seconds
or minutes, and only slower, so the fastest turn counts. Within a turn, wall time is the median of steps
between synchronisations, and the faster mean of two runs of steps back to back. GPU time is the sum of the
kernels of one step, from the profiler; memory is the allocator's peak. Under the compiler, a model's turns
follow each other.

    PYTHONPATH=src python benchmarks/whole_steps.py --out benchmarks/results/whole_steps.json
    PYTHONPATH=src python benchmarks/whole_steps.py --measured benchmarks/results/whole_steps.json --out ...

The second, which needs no GPU, predicts the recorded steps and sums up the errors.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from itertools import groupby
from operator import sub
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

from tilefit import gpus
from tilefit.capture import capture
from tilefit.capture.targets import InputOptions, load
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.cost.launch import REFERENCE_STEP_S, kernels
from tilefit.gpus import Gpu
from tilefit.measure.launch import launch_scale
from tilefit.ops import Step, StepOp

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "models.py"

#: Target, sizes, channels-last.
MODELS: list[tuple[str, dict[str, int], bool]] = [
    ("hf:gpt2", {"batch": 16, "seq": 1024}, False),
    ("hf:bert", {"batch": 32, "seq": 512}, False),
    ("hf:roberta", {"batch": 32, "seq": 510}, False),
    ("hf:distilbert", {"batch": 32, "seq": 512}, False),
    ("hf:t5", {"batch": 16, "seq": 512}, False),
    ("hf:bart", {"batch": 8, "seq": 512}, False),
    ("hf:whisper", {"batch": 16, "seq": 448}, False),
    ("hf:opt", {"batch": 8, "seq": 1024}, False),
    ("hf:vit", {"batch": 64}, False),
    ("hf:swin", {"batch": 64}, False),
    ("torchvision:resnet50", {"batch": 128}, False),
    ("torchvision:resnet50", {"batch": 128}, True),
    ("torchvision:mobilenet_v3_large", {"batch": 128}, False),
    ("torchvision:efficientnet_b0", {"batch": 128}, True),
    ("timm:convnext_tiny", {"batch": 64}, False),
    (f"{EXAMPLES}:unet", {}, False),
    (f"{EXAMPLES}:attention", {}, False),
    (f"{EXAMPLES}:odd_cnn", {}, False),
    (f"{EXAMPLES}:recommender", {}, False),
    (f"{EXAMPLES}:lstm_lm", {}, False),
]


#: What comes after a model's turns.
LOOK_INSIDE = -1


def launches(step: Step, gpu: Gpu) -> dict[str, dict[str, int]]:
    """By part of the step: its operations, the kernels beyond the first of each, how often another module
    runs than before, and the parameters that have a gradient."""
    parts: dict[str, list[StepOp]] = {}
    for entry in step.ops:
        parts.setdefault(entry.phase.partition("-")[0], []).append(entry)
    return {
        part: {
            "operations": len(entries),
            "kernels": sum(kernels(entry.op, gpu) - 1 for entry in entries),
            "modules": sum(1 for _ in groupby(entries, lambda entry: entry.site.module)),
            "parameters": sum(parameter.trainable for parameter in step.parameters.values()),
        }
        for part, entries in parts.items()
    }


def predicted(
    target: str, sizes: dict[str, int], channels_last: bool, gpu: str, compiled: bool
) -> dict[str, Any]:
    shapes = load(target, InputOptions(**sizes))
    step = capture(
        shapes.model,
        shapes.inputs,
        amp="bf16",
        loss=shapes.loss,
        channels_last=channels_last,
        compiled=compiled,
    )
    step = fuse(step) if compiled else step
    estimate = estimate_step(step, gpus.get(gpu))
    return {
        "predicted_ms": 1e3 * estimate.time_s,
        "predicted_gpu_ms": 1e3 * estimate.gpu_time_s,
        "predicted_host_ms": 1e3 * estimate.host_time_s,
        "predicted_gib": step.memory.peak_bytes / 2**30,
        "operations": len(step.ops),
        "launches": launches(step, gpus.get(gpu)),
        "recompiled": step.settings.recompiled,
        "kinds": sorted({entry.op.kind for entry in step.ops}),
    }


class Measured:
    """A model that takes training steps, and what they took.

    Attributes:
        turns: Of each: wall time of steps, back to back and not, the host's time in the forward pass, the
            backward pass and the optimizer, and what the cost model's reference step took then.
        once: Kernels and memory of a step, which do not vary.
    """

    def __init__(
        self, target: str, sizes: dict[str, int], channels_last: bool, device: str, compiled: bool
    ) -> None:
        loaded = load(target, InputOptions(device="cpu", **sizes))
        self.device = device
        self.model = loaded.model.to(device).train()
        self.loss = loaded.loss
        inputs = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, loaded.inputs)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
            inputs = tuple(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs)
        self.inputs = inputs
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.run = torch.compile(self.model) if compiled else self.model
        self.turns: list[dict[str, Any]] = []
        self.once: dict[str, Any] = {}

    def step(self) -> list[float]:
        """The times at which the host has launched the forward pass, the backward pass and the optimizer."""
        passed = [time.perf_counter()]
        with torch.autocast(self.device, dtype=torch.bfloat16):
            inputs = self.inputs
            output = self.run(**inputs) if isinstance(inputs, dict) else self.run(*inputs)
            loss = self.loss(output) if self.loss else getattr(output, "loss", output)
            if loss.dim():
                loss = loss.mean()
        passed.append(time.perf_counter())
        loss.backward()
        passed.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        passed.append(time.perf_counter())
        return passed

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def turn(self) -> None:
        reference_ms = 1e3 * REFERENCE_STEP_S * launch_scale(torch.device(self.device))
        for _ in range(4):
            self.step()
        self.synchronize()
        times, launched = [], []
        for _ in range(7):
            start = time.perf_counter()
            launched.append(self.step())
            self.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        # Back to back, as a training loop runs: the host may be ahead of the GPU.
        sustained = []
        for _ in range(2):
            start = time.perf_counter()
            for _ in range(5):
                self.step()
            self.synchronize()
            sustained.append(1e3 * (time.perf_counter() - start) / 5)
        self.turns.append(
            {
                "wall_ms": statistics.median(times),
                "sustained_ms": min(sustained),
                # A host that runs ahead far enough has to wait for the GPU: of a GPU-bound step these say
                # little.
                "host_ms": [  # forward, backward, optimizer
                    1e3 * statistics.median(part)
                    for part in zip(*(map(sub, p[1:], p) for p in launched), strict=True)
                ],
                "reference_ms": reference_ms,
            }
        )
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def look_inside(self) -> None:
        """Note kernels and memory of a step: after all turns, since a profiler may go on costing time."""
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - self.own_bytes()
            self.step()
            self.synchronize()
        activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            self.step()
            self.synchronize()
        kernels: dict[str, list[float]] = {}
        for event in profiler.events():
            if on_gpu and event.device_type == torch.autograd.DeviceType.CUDA:
                kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
        # Every kernel of the step: milliseconds, launches, name (the compiler's differ at the end).
        listed = sorted(
            ((round(sum(v) / 1e3, 5), len(v), _short(k)) for k, v in kernels.items()), reverse=True
        )
        self.once = {
            "gpu_ms": sum(sum(v) for v in kernels.values()) / 1e3,
            "kernels": sum(len(v) for v in kernels.values()),
            "peak_gib": (torch.cuda.max_memory_allocated() - others) / 2**30 if on_gpu else 0.0,
            "kernel_list": listed,
        }

    def own_bytes(self) -> int:
        """Memory of what is alive between steps: other models have theirs beside it."""
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        leaves = [*self.model.parameters(), *self.model.buffers(), *state, *tree_leaves(self.inputs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def row(self) -> dict[str, Any]:
        return {
            "wall_ms": min(turn["wall_ms"] for turn in self.turns),
            "sustained_ms": min(turn["sustained_ms"] for turn in self.turns),
            "host_ms": [min(parts) for parts in zip(*(turn["host_ms"] for turn in self.turns), strict=True)],
            "sustained_turns_ms": [turn["sustained_ms"] for turn in self.turns],
            "reference_turns_ms": [turn["reference_ms"] for turn in self.turns],
            **self.once,
        }


def _short(name: str) -> str:
    return name if len(name) <= 160 else name[:120] + "…" + name[-39:]


def predict_again(recorded: Path, gpu: str, out: Path | None) -> None:
    """Predict recorded steps with the cost model as it stands and print how far off it is."""
    result = json.loads(recorded.read_text())
    by_name = {label(*entry): entry for entry in MODELS}
    for row in result["rows"]:
        target, sizes, channels_last = by_name[row["model"]]
        row.update(predicted(target, sizes, channels_last, gpu, result.get("compiled", False)))
        row.update(errors(row))
        print(
            f"{row['model']:46} GPU {row['predicted_gpu_ms']:7.2f} of {row['gpu_ms']:7.2f} ms "
            f"({row['error_gpu']:+.1%})  step {row['predicted_ms']:7.2f} of {row['sustained_ms']:7.2f} ms "
            f"({row['error_wall']:+.1%})  memory {row['predicted_gib']:6.2f} of {row['peak_gib']:6.2f} GiB"
        )
    for kind in ("gpu", "wall", "memory"):
        off = sorted(abs(row[f"error_{kind}"]) for row in result["rows"])
        result[f"median_error_{kind}"] = statistics.median(off)
        result[f"worst_error_{kind}"] = off[-1]
        print(f"{kind}: median {statistics.median(off):.1%}, worst {off[-1]:.1%} of {len(off)} steps")
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


def label(target: str, sizes: dict[str, int], channels_last: bool) -> str:
    name = target.replace(str(EXAMPLES), "examples/models.py")
    return name + (" channels-last" if channels_last else "")


def errors(row: dict[str, Any]) -> dict[str, float]:
    return {
        "error_gpu": row["predicted_gpu_ms"] / row["gpu_ms"] - 1,
        "error_wall": row["predicted_ms"] / row["sustained_ms"] - 1,
        "error_memory": row["predicted_gib"] / row["peak_gib"] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpu", default="h200", help="the GPU to predict for")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="measure targets whose name contains this")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile")
    parser.add_argument("--turns", type=int, default=5, help="how often each model is measured")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start nothing further after this time")
    parser.add_argument("--measured", type=Path, help="predict the steps recorded in this file")
    options = parser.parse_args()
    if options.measured:
        predict_again(options.measured, options.gpu, options.out)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures on a GPU, and PyTorch finds none here.")
    start = time.perf_counter()
    models: dict[str, Measured] = {}
    rows: dict[str, dict[str, Any]] = {}
    wanted = [entry for entry in MODELS if options.only in entry[0]]
    turns = range(options.turns)
    if options.compiled:
        schedule = [(entry, turn) for entry in wanted for turn in (*turns, LOOK_INSIDE)]
    else:
        schedule = [(entry, turn) for turn in (*turns, LOOK_INSIDE) for entry in wanted]
    for entry, turn in schedule:
        name = label(*entry)
        row = rows.get(name, {})
        is_late = time.perf_counter() - start > options.budget_s
        if "failure" in row or (turn == LOOK_INSIDE and not row) or (turn != LOOK_INSIDE and is_late):
            continue
        # A step that the GPU bounds takes the same whatever else the host does.
        if turn not in (0, 1, LOOK_INSIDE) and row["wall_ms"] > 1.5 * sum(row["host_ms"]):
            continue
        try:
            if name not in models:
                models[name] = Measured(*entry, options.device, options.compiled)
            if turn == LOOK_INSIDE:
                models[name].look_inside()
            else:
                models[name].turn()
            rows[name] = {"model": name, **entry[1], **models[name].row()}
            print(f"{turn} {name:46} {rows[name]['sustained_ms']:7.2f} ms", flush=True)
        except Exception as error:  # noqa: BLE001 - one model's failure is a row of the result
            rows[name] = {"model": name, "failure": f"{type(error).__name__}: {error}"[:300]}
            print(f"{turn} {name:46} {rows[name]['failure']}", flush=True)
        if "failure" in rows[name] or (options.compiled and turn == LOOK_INSIDE):
            models.pop(name, None)
            torch._dynamo.reset()
        # The collector would look through all models' objects again and again while steps are timed.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if options.out:
            result = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
                "torch": torch.__version__,
                "compiled": options.compiled,
                "rows": list(rows.values()),
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
