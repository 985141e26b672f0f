"""Measure what `tilefit.optimize` gains on a GPU: training steps of real models, original and fixed in turn.

Every model runs eager training steps under bf16 autocast with AdamW (PyTorch's defaults otherwise): as it is,
and after the first fix of its plan, the first two, and so on; candidates of one fix that follow each other
are one. The variants run in turn, some steps each, so that a drift of the clock meets all of them; a time is
the lower quartile over the rounds, since what else runs on the host can only make a step slower. A row per
model is written as soon as it is measured:

    PYTHONPATH=src python benchmarks/fix_gain.py --out benchmarks/results/fix_gain.json

``--whole`` leaves out what lies between.

``--compiled`` measures instead, under ``torch.compile``, the original and the model with the plan that is
made for the compiler (``compiled_gain.py``: the same for many models in a short time).
Plans are made ahead, by other processes, for a host that launches as fast as this one (``launch_scale``).
``--device cpu`` is a dry run on small inputs. A model that fails is a row that says why.

With ``--measured FILE`` nothing is measured: the fixes recorded in FILE are predicted again, in their order,
which needs no GPU, and compared with what they gained. A recorded gain of wall time counts where its noise is
smaller than what the bar allows; that of GPU time is shown beside it, since a busy host does not disturb it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count as naturals
from itertools import groupby
from math import hypot
from operator import sub
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

import tilefit
from tilefit.capture.forward import call, loss_of_output
from tilefit.capture.targets import Target, load
from tilefit.cost import StepEstimate, estimate_step
from tilefit.cost.measured import MeasuredRun
from tilefit.cost.priced import PricedGpu, priced
from tilefit.fixes import ChangeSet, Context, Refusal, Run, all_fixes
from tilefit.fixes.planning import planner
from tilefit.measure.launch import launch_scale
from tilefit.ops import Step
from tilefit.options import StepOptions, TargetOptions

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "models.py"
OTHERS = Path(__file__).resolve().parent / "compiled_models.py"
LLAMA = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Model:
    """What is measured.

    Attributes:
        target, sizes, arguments: As for ``tilefit check``.
        channels_last: The user runs it so already.
        healthy: Nothing should be worth changing but, perhaps, settings.
        bar: What the plan is to gain at least.
    """

    target: str
    sizes: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, int] = field(default_factory=dict)
    channels_last: bool = False
    healthy: bool = False
    bar: float = 1.0


MODELS = {
    "gpt2": Model("hf:gpt2", {"batch": 16, "seq": 1024}, bar=1.28),
    "roberta": Model("hf:roberta", {"batch": 32, "seq": 510}, bar=1.45),
    "bert-mlm": Model("hf:bert", {"batch": 32, "seq": 512}, bar=1.12),
    "whisper-small": Model(
        "hf:whisper",
        {"batch": 16, "seq": 448},
        {
            "d_model": 768,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
        bar=1.09,
    ),
    "llama-1b-odd": Model(
        "hf:llama",
        {"batch": 4, "seq": 2048},
        {**LLAMA, "intermediate_size": 5461, "vocab_size": 32001},
        bar=2.4,
    ),
    "resnet50-nchw": Model("torchvision:resnet50", {"batch": 128}, bar=1.75),
    "mobilenet-v3-nchw": Model("torchvision:mobilenet_v3_large", {"batch": 128}, bar=3.0),
    "odd-cnn": Model(f"{EXAMPLES}:odd_cnn", bar=1.5),
    "attention-by-hand": Model(f"{EXAMPLES}:attention", bar=1.3),
    "odd-mlp": Model(f"{EXAMPLES}:odd_mlp", bar=1.5),
    "llama-1b": Model(
        "hf:llama",
        {"batch": 4, "seq": 2048},
        {**LLAMA, "intermediate_size": 5632, "vocab_size": 32000},
        healthy=True,
    ),
    "vit": Model("hf:vit", {"batch": 64}, healthy=True),
    "t5": Model("hf:t5", {"batch": 16, "seq": 512}, healthy=True),
    "bart": Model("hf:bart", {"batch": 8, "seq": 512}),
    "opt": Model("hf:opt", {"batch": 8, "seq": 1024}, healthy=True),
    "distilbert": Model("hf:distilbert", {"batch": 32, "seq": 512}),
    "swin": Model("hf:swin", {"batch": 64}, healthy=True),
    "resnet50-nhwc": Model("torchvision:resnet50", {"batch": 128}, channels_last=True, healthy=True),
    "efficientnet-nhwc": Model(
        "torchvision:efficientnet_b0", {"batch": 128}, channels_last=True, healthy=True
    ),
    "convnext": Model("timm:convnext_tiny", {"batch": 64}),
    "unet": Model(f"{EXAMPLES}:unet"),
    "recommender": Model(f"{EXAMPLES}:recommender"),
    "lstm-lm": Model(f"{EXAMPLES}:lstm_lm"),
    "speech": Model(f"{EXAMPLES}:speech"),
    "odd-encoder": Model(f"{OTHERS}:odd_encoder"),
    "encoder": Model(f"{OTHERS}:encoder"),
    "translator": Model(f"{OTHERS}:translator"),
    "next-word": Model(f"{OTHERS}:next_word"),
    "vit-torchvision": Model("torchvision:vit_b_16", {"batch": 64}),
    "video": Model("torchvision:r3d_18", {"batch": 16}),
    "regnet": Model("torchvision:regnet_y_1_6gf", {"batch": 64}),
    "albert": Model("hf:albert", {"batch": 32, "seq": 512}),
    "detector": Model(f"{OTHERS}:detector"),
    "graph": Model(f"{OTHERS}:graph"),
    "autoencoder": Model(f"{OTHERS}:autoencoder"),
    "segmenter": Model(f"{OTHERS}:segmenter"),
    "deberta": Model(f"{OTHERS}:deberta"),
    "vit-mae": Model("hf:vit_mae", {"batch": 64}),
    "electra": Model("hf:electra", {"batch": 32, "seq": 512}),
    "densenet": Model("torchvision:densenet121", {"batch": 64}),
    "resnext": Model("torchvision:resnext50_32x4d", {"batch": 64}),
}

#: Sizes of a dry run.
SMALL = {"batch": 2, "seq": 16}


@dataclass(frozen=True)
class Planned:
    """What a plan says.

    Attributes:
        fixes: Candidates of each fix.
        row: Of the result, without measurements.
    """

    fixes: tuple[tuple[ChangeSet, ...], ...]
    row: dict[str, Any]

    def first(self, count: int) -> list[ChangeSet]:
        """The candidates of the first fixes."""
        return [candidate for fix in self.fixes[:count] for candidate in fix]


# ---- one variant of a model --------------------------------------------------------------------


class Variant:
    """A model with some of its plan's fixes, ready to take training steps."""

    def __init__(
        self, name: str, loaded: Target, model: Model, candidates: Sequence[ChangeSet], device: str
    ) -> None:
        self.name = name
        self.device = device
        module = copy.deepcopy(loaded.model).to(device).train()
        inputs = tree_map(lambda t: _real(t, device), loaded.inputs)
        if model.channels_last:
            module = module.to(memory_format=torch.channels_last)
            inputs = tree_map(_in_channels_last, inputs)
        self.run = Run(module, inputs, _options(model), loss=loaded.loss)
        for candidate in candidates:
            candidate.apply(self.run)
        self._flags = _flags()
        self.model: Callable[..., Any] = self.run.model
        if self.run.options.compile and self.run.model._compiled_call_impl is None:
            self.model = torch.compile(self.run.model)
        fused = True if self.run.options.fused_optimizer else None
        self.optimizer = torch.optim.AdamW(self.run.model.parameters(), lr=1e-6, fused=fused)

    def step(self) -> float:
        """One training step; the loss is left on the device."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss, _ = loss_of_output(call(self.model, self.run.inputs), self.run.loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def timed_s(self, steps: int) -> float:
        """Wall time of a step among ``steps`` in a row, as a training loop runs."""
        with self.flags():
            self.step()  # caches, allocator and clocks after the other variants
            synchronize(self.device)
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            synchronize(self.device)
            return (time.perf_counter() - start) / steps

    def gpu_s(self) -> float:
        """Sum of the kernels of one step."""
        with self.flags(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.step()
            synchronize(self.device)
        cuda = torch.autograd.DeviceType.CUDA
        return 1e-6 * sum(e.time_range.elapsed_us() for e in profiler.events() if e.device_type == cuda)

    def step_bytes(self) -> int:
        """Most memory alive during a step, beyond what is alive between steps."""
        with self.flags():
            synchronize(self.device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            synchronize(self.device)
            return torch.cuda.max_memory_allocated() - before

    @contextlib.contextmanager
    def flags(self) -> Iterator[None]:
        """Within the block, PyTorch's global switches are as this variant's fixes set them."""
        kept = _flags()
        _set_flags(self._flags)
        try:
            yield
        finally:
            _set_flags(kept)


def _flags() -> tuple[bool, bool, bool]:
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )


def _set_flags(flags: tuple[bool, bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags[:2]
    torch.backends.cudnn.benchmark = flags[2]


def _real(leaf: Any, device: str) -> Any:
    """Random data in place of zeros: on zeros a GPU draws less power and runs faster."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, dtype=leaf.dtype, device=device)
    return leaf.to(device)


def _options(model: Model) -> StepOptions:
    return StepOptions(amp="bf16", channels_last=model.channels_last)


def _in_channels_last(leaf: Any) -> Any:
    is_image = isinstance(leaf, torch.Tensor) and leaf.dim() == 4
    return leaf.to(memory_format=torch.channels_last) if is_image else leaf


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- one model ---------------------------------------------------------------------------------


def load_model(model: Model, device: str, small: bool) -> Target:
    sizes = {name: SMALL[name] for name in model.sizes if small} or model.sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return load(model.target, TargetOptions(on_cpu=device == "cpu", arguments=model.arguments, **sizes))


def on_host(gpu: str, scale: float) -> PricedGpu:
    """The GPU behind a host whose launches take ``scale`` times the model's."""
    return replace(priced(gpu), run=MeasuredRun(Step(()), (), (), launch_scale=scale))


def planned(
    name: str,
    gpu: str,
    level: str,
    compiled: bool,
    scale: float,
    ignore: Sequence[str] = (),
    for_this_host: bool = False,
    may_compile: bool = False,
) -> Planned:
    """The plan of a model, made without weights; ``for_this_host``: whatever it were on slower hosts;
    ``may_compile``: it may compile the whole model."""
    if for_this_host:
        planner.HOSTS = ()
    start = time.perf_counter()
    model = MODELS[name]
    loaded = load_model(model, "meta", small=False)
    plan = tilefit.optimize(
        loaded.model,
        loaded.inputs,
        gpu=on_host(gpu, scale),
        level=level,
        amp="bf16",
        loss=loaded.loss,
        channels_last=model.channels_last,
        compile=compiled,
        ignore=[*ignore, *([] if compiled or may_compile else ["NTC001"])],
        verify=False,
    )
    pairs = zip(plan.fixes, plan.candidates, strict=True)
    fixes = [(fix_name, list(group)) for fix_name, group in groupby(pairs, key=lambda pair: pair[0].name)]
    row = {
        "model": name,
        "healthy": model.healthy,
        "plan_s": time.perf_counter() - start,
        "predicted_speedup": plan.speedup,
        "predicted_before_ms": 1e3 * plan.before_s,
        "predicted_gib": [plan.before_bytes / 2**30, plan.after_bytes / 2**30],
        "fixes": [
            {
                "name": fix_name,
                "summaries": [fix.summary for fix, _ in group],
                "predicted_ms": 1e3 * sum(fix.gain_s for fix, _ in group),
            }
            for fix_name, group in fixes
        ],
        "refused": sorted({f"{r.name}: {r.reason}" for r in plan.refused})[:5],
    }
    return Planned(tuple(tuple(candidate for _, candidate in group) for _, group in fixes), row)


def measured(
    plan: Planned,
    model: Model,
    options: argparse.Namespace,
    alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> dict[str, Any]:
    """The row of a model, with what its steps took; they are timed within ``alone()``."""
    row = plan.row
    number = len(plan.fixes)
    # A healthy model against itself; under the compiler the plan as a whole.
    counts = (0, number) if options.compiled or options.whole or not number else range(number + 1)
    loaded = load_model(model, "cpu", options.device == "cpu")
    variants = [
        Variant(f"{count} fixes", loaded, model, plan.first(count), options.device) for count in counts
    ]
    if options.compiled:
        row["compile_s"] = [under_the_compiler(variant) for variant in variants]
    for variant in variants:
        with variant.flags():
            for _ in range(3):
                variant.step()
    gc.collect()
    with alone():
        timed(row, variants, options)
    row["speedup"] = row["wall_ms"][0] / row["wall_ms"][-1]
    row["bar"] = 1.0 if options.compiled else model.bar
    if not (options.compiled or options.whole):
        for index, fix in enumerate(row["fixes"]):
            fix["measured_ms"] = row["wall_ms"][index] - row["wall_ms"][index + 1]
        judge(row)
    return row


def timed(row: dict[str, Any], variants: Sequence[Variant], options: argparse.Namespace) -> None:
    """Put into ``row`` what the steps of warm variants took."""
    once_s = max(variant.timed_s(1) for variant in variants)
    steps = max(1, min(30, round(options.round_s / once_s)))
    gc.freeze()  # or the collector looks through all of this again and again while steps are timed
    rounds: list[list[float]] = [[] for _ in variants]
    began = time.perf_counter()
    for turn in naturals():
        # Small models are the host's: what else it does has to be averaged out.
        if turn >= options.rounds and time.perf_counter() - began >= options.model_s:
            break
        # Back and forth, so that none always follows the same other.
        order = range(len(variants)) if turn % 2 == 0 else reversed(range(len(variants)))
        for index in order:
            rounds[index].append(variants[index].timed_s(steps))
    row["launch_scale"] = launch_scale(torch.device(options.device))
    row["wall_ms"] = [1e3 * lower_quartile(times) for times in rounds]
    row["rounds_ms"] = [[round(1e3 * time_s, 3) for time_s in times] for times in rounds]
    row["noise_ms"] = [1e3 * (lower_quartile(times) - min(times)) for times in rounds]
    if options.device == "cuda":
        row["gpu_ms"] = [1e3 * variant.gpu_s() for variant in variants]
        row["step_gib"] = [variant.step_bytes() / 2**30 for variant in variants]


def lower_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def under_the_compiler(variant: Variant) -> float:
    """Seconds of compiling it, first step included."""
    start = time.perf_counter()
    if variant.run.model._compiled_call_impl is None:  # else a fix has done it, in its own mode
        variant.model = torch.compile(variant.run.model)
    with variant.flags():
        variant.step()
    synchronize(variant.device)
    return time.perf_counter() - start


def is_foreseen(predicted_ms: float, measured_ms: float, step_ms: float) -> bool:
    """The bar: within 25 % of the gain, or 2 % of the step."""
    return abs(predicted_ms - measured_ms) <= max(0.25 * abs(measured_ms), 0.02 * step_ms)


def judge(row: dict[str, Any]) -> None:
    """Say of each fix whether its gain was foreseen, and measured well enough to tell."""
    for index, fix in enumerate(row["fixes"]):
        measured_ms, step_ms = fix["measured_ms"], row["wall_ms"][0]
        fix["foreseen"] = is_foreseen(fix["predicted_ms"], measured_ms, step_ms)
        # Of the two times that it is the difference of.
        fix["noise_ms"] = hypot(*row["noise_ms"][index : index + 2])
        fix["is_noise"] = not is_foreseen(measured_ms + fix["noise_ms"], measured_ms, step_ms)


# ---- a record, predicted again -----------------------------------------------------------------


def predicted_again(row: dict[str, Any], gpu: PricedGpu) -> None:
    """Put today's predictions of its fixes into a recorded row."""
    model = MODELS[row["model"]]
    loaded = load_model(model, "meta", small=False)
    run = Run(loaded.model, loaded.inputs, _options(model), loss=loaded.loss)
    estimate = estimate_step(run.compiled(run.capture()), gpu)
    row["predicted_before_ms"] = 1e3 * estimate.time_s
    row["predicted_gpu_ms"] = [1e3 * estimate.gpu_time_s]
    python_s = 0.0
    for fix in row["fixes"]:
        more_s, after = with_recorded(run, fix, gpu, python_s)
        python_s += more_s
        fix["predicted_ms"] = 1e3 * (estimate.time_s - after.time_s)
        row["predicted_gpu_ms"].append(1e3 * after.gpu_time_s)
        estimate = after


def with_recorded(
    run: Run, fix: dict[str, Any], gpu: PricedGpu, python_s: float
) -> tuple[float, StepEstimate]:
    """Host time of the Python of the changes that a record names; and the estimate after they are made to
    ``run``, on top of Python that takes ``python_s``."""
    more_s = 0.0
    (finder,) = [each for each in all_fixes() if each.name == fix["name"]]

    for summary in fix["summaries"]:
        step = run.capture()
        context = Context(step, gpu, estimate_step(step, gpu), run)
        found = [c for c in finder.find(context) if not isinstance(c, Refusal) and c.words == summary]
        if not found:
            raise LookupError(f"{fix['name']} does not find this any more: {summary}")
        found[0].apply(run)
        more_s += found[0].host_s
    eager = not (run.options.compile or run.cuda_graph)
    return more_s, estimate_step(run.compiled(run.capture()), gpu, python_s=eager * (python_s + more_s))


def predict_again(recorded: Path, gpu: str, names: Sequence[str], out: Path | None) -> None:
    """Predict the fixes of a record, and print how far off the predictions are."""
    result = json.loads(recorded.read_text())
    result["rows"] = [row for row in result["rows"] if row["model"] in names and "speedup" in row]
    on_gpu: list[bool] = []
    print(f"{'':18} {'':20} {'gain of GPU time, ms':>22}  {'of wall time, ms':>32}")
    pair = f"{'predicted':>11}{'measured':>11}"
    print(f"{'model':18} {'fix':20} {pair}  {pair}{'noise':>10}")
    for row in result["rows"]:
        predicted_again(row, on_host(gpu, row["launch_scale"]))
        judge(row)
        gains_ms = [map(sub, ms, ms[1:]) for ms in (row["predicted_gpu_ms"], row["gpu_ms"])]
        # A model without fixes was measured against itself.
        for fix, predicted_ms, measured_ms in zip(row["fixes"], *gains_ms, strict=False):
            on_gpu.append(is_foreseen(predicted_ms, measured_ms, row["gpu_ms"][0]))
            verdict = "noise" if fix["is_noise"] else "" if fix["foreseen"] else "OFF"
            print(
                f"{row['model']:18} {fix['name']:20} {predicted_ms:11.2f}{measured_ms:11.2f}  "
                f"{fix['predicted_ms']:11.2f}{fix['measured_ms']:11.2f}{fix['noise_ms']:10.2f}  {verdict}"
            )
    clear = [fix["foreseen"] for row in result["rows"] for fix in row["fixes"] if not fix["is_noise"]]
    print(f"foreseen: GPU time {sum(on_gpu)} of {len(on_gpu)}")
    print(f"foreseen: wall time {sum(clear)} of the {len(clear)} that are above the noise")
    result["summary"] = summary(result["rows"])
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


# ---- all of them -------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the bars ask for."""
    done = [row for row in rows if "speedup" in row]
    changed = [row["speedup"] for row in done if row["fixes"]]
    fixes = [fix for row in done for fix in row["fixes"] if "foreseen" in fix]
    clear = [fix for fix in fixes if not fix["is_noise"]]
    return {
        "models": len(done),
        # Without a fix, a model is measured against itself.
        "slower": [row["model"] for row in done if row["fixes"] and row["speedup"] < 0.99],
        "missed": [row["model"] for row in done if row["speedup"] < row.get("bar", 0.0) and row["bar"] > 1],
        "geomean": statistics.geometric_mean(changed) if changed else None,
        "fixes": len(fixes),
        "foreseen": sum(fix["foreseen"] for fix in fixes) / len(fixes) if fixes else None,
        "clear_fixes": len(clear),
        "clear_foreseen": sum(fix["foreseen"] for fix in clear) / len(clear) if clear else None,
    }


def _worker() -> None:
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpu", default="h200", help="the GPU to plan for")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--level", default="safe", choices=("safe", "unsafe"))
    parser.add_argument("--models", default="", help="names, with commas between; all if empty")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile instead")
    parser.add_argument("--ignore", default="", help="fixes that no plan gets, with spaces between")
    parser.add_argument("--for-this-host", action="store_true", help="slower hosts count for nothing")
    parser.add_argument("--may-compile", action="store_true", help="plans may compile the whole model")
    parser.add_argument("--whole", action="store_true", help="the original and all fixes, nothing in between")
    parser.add_argument("--plan-only", action="store_true", help="predict, and measure nothing")
    parser.add_argument("--rounds", type=int, default=7, help="at least")
    parser.add_argument("--model-s", type=float, default=6.0, help="a model's rounds take at least so long")
    parser.add_argument("--round-s", type=float, default=0.3, help="about how long one variant's turn is")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no further model after this time")
    parser.add_argument("--measured", type=Path, help="predict the fixes recorded in this file again")
    options = parser.parse_args()
    wanted = options.models.split(",") if options.models else list(MODELS)
    unknown = sorted(set(wanted) - set(MODELS))
    if unknown:
        sys.exit(f"There is no model {unknown[0]}; there are {', '.join(MODELS)}.")
    if options.measured:
        predict_again(options.measured, options.gpu, wanted, options.out)
        return
    if options.device == "cuda" and not (options.plan_only or torch.cuda.is_available()):
        sys.exit("This measures on a GPU, and PyTorch finds none here.")
    measures = not options.plan_only and options.device == "cuda"
    scale = launch_scale(torch.device("cuda")) if measures else 1.0
    with ProcessPoolExecutor(
        min(8, max(1, (os.cpu_count() or 1) // 2)), multiprocessing.get_context("spawn"), _worker
    ) as pool:
        plans = {
            name: pool.submit(
                planned,
                name,
                options.gpu,
                options.level,
                options.compiled,
                scale,
                options.ignore.split(),
                options.for_this_host,
                options.may_compile,
            )
            for name in wanted
        }
        wait(plans.values())  # they would disturb what is measured
        rows: list[dict[str, Any]] = []
        start = time.perf_counter()
        for name in wanted:
            if time.perf_counter() - start > options.budget_s:
                pool.shutdown(cancel_futures=True)
                break
            began = time.perf_counter()
            try:
                plan = plans[name].result()
                rows.append(plan.row if options.plan_only else measured(plan, MODELS[name], options))
            except Exception as error:  # noqa: BLE001 - one model's failure is a row of the result
                traceback.print_exc()
                rows.append({"model": name, "failure": f"{type(error).__name__}: {error}"[:500]})
            rows[-1]["took_s"] = time.perf_counter() - began
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                written = {
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
                    "torch": torch.__version__,
                    "level": options.level,
                    "compiled": options.compiled,
                    "launch_scale": scale,
                    "summary": summary(rows),
                    "rows": rows,
                }
                options.out.write_text(json.dumps(written, indent=1) + "\n")
            gc.unfreeze()
            gc.collect()
            torch._dynamo.reset()  # the next model's sizes are not this one's that vary
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
