"""Measure whole training steps of real models on a GPU, beside tilefit's prediction.

Each model runs eager training steps under bf16 autocast with AdamW (PyTorch's defaults otherwise). The models
are measured one after another, several times over: what else runs on the host makes steps slower for seconds
or minutes, and only slower, so the fastest turn counts. Within a turn, wall time is the median of steps
between synchronisations, and the faster mean of two runs of steps back to back. GPU time is the sum of the
kernels of one step, from the profiler; memory is the allocator's peak. Under the compiler, a model's turns
follow each other.

With ``--infer`` it is the forward pass alone, of ``model.eval()`` in ``torch.no_grad``, as ``tilefit check
--infer`` takes it; of the same models, and of some with one sample, whose step the host limits. Some of these
have bf16 weights and no autocast.

    PYTHONPATH=src python benchmarks/whole_steps.py --out benchmarks/results/whole_steps.json
    PYTHONPATH=src python benchmarks/whole_steps.py --infer --turns 3 --out ..._inference.json
    PYTHONPATH=src python benchmarks/whole_steps.py --measured benchmarks/results/whole_steps.json --out ...

The last, which needs no GPU, predicts recorded steps and sums up the errors: of several files together, and
apart of the steps that set nothing of the model (``held_out``); ``--out`` takes those of one file.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import groupby
from operator import sub
from pathlib import Path
from typing import Any

import torch
from common_spread import own_width_s
from slow_host import slowed
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

from tilefit.capture import capture
from tilefit.capture.targets import Target, load
from tilefit.cost import estimate_step
from tilefit.cost.footprint import converted_bytes
from tilefit.cost.fusion import fuse
from tilefit.cost.launch import REFERENCE_STEP_S, launch
from tilefit.cost.measured import MeasuredRun
from tilefit.cost.priced import PricedGpu, left_out, priced
from tilefit.gpus import Gpu, get
from tilefit.measure.clocks import driver_version
from tilefit.measure.launch import launch_scale
from tilefit.ops import Step, StepOp
from tilefit.options import TargetOptions

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "models.py"
FURTHER = Path(__file__).resolve().parent / "compiled_models.py"
UNSEEN = Path(__file__).resolve().parent / "unseen_models.py"
LATER = Path(__file__).resolve().parent / "later_models.py"
NEWER = Path(__file__).resolve().parent / "newer_models.py"
OTHER = Path(__file__).resolve().parent / "other_models.py"
FRESH = Path(__file__).resolve().parent / "fresh_models.py"
HELD = Path(__file__).resolve().parent / "held_models.py"
YOUNG = Path(__file__).resolve().parent / "young_models.py"
PADS = Path(__file__).resolve().parent / "padded_models.py"
CALLS = Path(__file__).resolve().parent / "compiled_calls.py"

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

#: Of these, the first were measured under the compiler before the others.
FIRST_COMPILED = 16
#: Of those that were predicted before they were measured, the first, which set something since.
FIRST_PREDICTED = 41

#: Sizes of a transformer, as its configuration names them.
_DECODER = {"num_hidden_layers": 8, "num_attention_heads": 16, "hidden_size": 1024, "vocab_size": 32000}

#: Training steps that are measured under the compiler alone (``compiled_steps.py``), those that take longest
#: to compile first: target, sizes, channels-last, sizes of the constructor.
COMPILED: list[tuple[str, dict[str, int], bool, dict[str, int]]] = [
    ("torchvision:densenet121", {"batch": 64}, False, {}),
    ("torchvision:efficientnet_b0", {"batch": 128}, False, {}),
    ("timm:hrnet_w18_small", {"batch": 32}, False, {}),
    ("hf:mobilevit", {"batch": 32}, False, {}),
    (f"{FURTHER}:deberta", {}, False, {}),
    ("hf:mobilebert", {"batch": 32, "seq": 256}, False, {"num_hidden_layers": 12}),
    ("hf:segformer", {"batch": 16, "image_size": 512}, False, {}),
    (f"{FURTHER}:segformer", {}, False, {}),
    ("hf:swinv2", {"batch": 32}, False, {}),
    ("torchvision:regnet_y_1_6gf", {"batch": 64}, False, {}),
    ("torchvision:shufflenet_v2_x1_0", {"batch": 128}, False, {}),
    ("torchvision:swin_t", {"batch": 64}, False, {}),
    ("torchvision:fcn_resnet50", {"batch": 8, "image_size": 512}, False, {}),
    (f"{FURTHER}:detector", {}, False, {}),
    (f"{FURTHER}:graph", {}, False, {}),
    (f"{FURTHER}:segmenter", {}, False, {}),
    (f"{FURTHER}:points", {}, False, {}),
    (f"{FURTHER}:autoencoder", {}, False, {}),
    (f"{FURTHER}:click_rate", {}, False, {}),
    (f"{FURTHER}:registration", {}, False, {}),
    (f"{FURTHER}:resolution", {}, False, {}),
    (f"{FURTHER}:wave", {}, False, {}),
    (f"{FURTHER}:words", {}, False, {}),
    (f"{FURTHER}:mlp", {}, False, {}),
    (f"{FURTHER}:encoder", {}, False, {}),
    ("hf:electra", {"batch": 32, "seq": 512}, False, {}),
    (
        "hf:llama",
        {"batch": 4, "seq": 2048},
        False,
        {**_DECODER, "num_key_value_heads": 4, "intermediate_size": 2816},
    ),
    ("timm:poolformer_s12", {"batch": 64}, False, {}),
    ("timm:mixer_b16_224", {"batch": 64}, False, {}),
    ("torchvision:resnext50_32x4d", {"batch": 64}, False, {}),
    ("torchvision:r3d_18", {"batch": 8}, False, {}),
    ("torchvision:vgg16_bn", {"batch": 64}, False, {}),
    ("hf:convnextv2", {"batch": 64}, False, {}),
    ("hf:clip", {"batch": 64}, False, {}),
    (
        "hf:bloom",
        {"batch": 8, "seq": 512},
        False,
        {"n_layer": 8, "n_head": 16, "hidden_size": 1024, "vocab_size": 32000},
    ),
    (
        "hf:albert",
        {"batch": 16, "seq": 512},
        False,
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    ("hf:dinov2", {"batch": 32}, False, {}),
    ("torchvision:vit_b_16", {"batch": 64}, False, {}),
    ("hf:gpt_neox", {"batch": 8, "seq": 1024}, False, {**_DECODER, "intermediate_size": 4096}),
    (
        "hf:qwen3",
        {"batch": 4, "seq": 1024},
        False,
        {**_DECODER, "num_key_value_heads": 8, "intermediate_size": 3072},
    ),
    (f"{EXAMPLES}:speech", {}, False, {}),
]

#: Those that were predicted before they were measured (``compiled_steps.py --predict``), likewise.
_FOUR_LAYERS = {**_DECODER, "num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 3584}
PREDICTED: list[tuple[str, dict[str, int], bool, dict[str, int]]] = [
    ("timm:xcit_nano_12_p16_224", {"batch": 64}, False, {}),
    ("timm:ghostnet_100", {"batch": 128}, False, {}),
    (f"{UNSEEN}:unrolled", {}, False, {}),
    ("torchvision:mnasnet0_5", {"batch": 128}, True, {}),
    ("hf:gemma2", {"batch": 4, "seq": 1024}, False, {**_FOUR_LAYERS, "head_dim": 128}),
    ("hf:beit", {"batch": 32}, False, {"num_hidden_layers": 4}),
    (
        "hf:xlnet",
        {"batch": 16, "seq": 384},
        False,
        {"n_layer": 4, "d_model": 768, "n_head": 12, "d_inner": 3072},
    ),
    ("hf:mpnet", {"batch": 16, "seq": 384}, False, {"num_hidden_layers": 4}),
    ("hf:mistral", {"batch": 4, "seq": 1024}, False, _FOUR_LAYERS),
    (f"{UNSEEN}:routed", {}, False, {}),
    ("timm:resmlp_12_224", {"batch": 64}, False, {}),
    ("torchvision:squeezenet1_1", {"batch": 128}, False, {}),
    (f"{UNSEEN}:volumes", {}, False, {}),
    (f"{UNSEEN}:scan", {}, False, {}),
    (f"{UNSEEN}:field", {}, False, {}),
    (f"{UNSEEN}:edge_attention", {}, False, {}),
    (f"{UNSEEN}:flow", {}, False, {}),
    (f"{UNSEEN}:spectral", {}, False, {}),
    (f"{UNSEEN}:codebook", {}, False, {}),
    (f"{UNSEEN}:bags", {}, False, {}),
    (f"{UNSEEN}:pairs", {}, False, {}),
    (f"{UNSEEN}:policy", {}, False, {}),
    # From here on after those before had set what the host takes.
    ("timm:repvgg_a0", {"batch": 128}, False, {}),
    ("timm:res2net50_26w_4s", {"batch": 64}, False, {}),
    ("timm:gmlp_s16_224", {"batch": 64}, False, {}),
    ("timm:pit_s_224", {"batch": 64}, False, {}),
    ("torchvision:mc3_18", {"batch": 8}, False, {}),
    ("hf:roformer", {"batch": 16, "seq": 384}, False, {"num_hidden_layers": 4}),
    (
        "hf:phi",
        {"batch": 4, "seq": 1024},
        False,
        {**_DECODER, "num_hidden_layers": 4, "intermediate_size": 4096},
    ),
    (f"{LATER}:captions", {}, False, {}),
    (f"{LATER}:sound", {}, False, {}),
    (f"{LATER}:splines", {}, False, {}),
    (f"{LATER}:latents", {}, False, {}),
    (f"{LATER}:hashed", {}, False, {}),
    (f"{LATER}:sessions", {}, False, {}),
    (f"{LATER}:triplets", {}, False, {}),
    (f"{LATER}:states", {}, False, {}),
    (f"{LATER}:twins", {}, False, {}),
    (f"{LATER}:adapted", {}, False, {}),
    (f"{LATER}:quantised", {}, False, {}),
    (f"{LATER}:diffusion", {}, False, {}),
    # From here on after those before had told what is kept for the backward pass.
    (f"{NEWER}:operator", {}, False, {}),
    (f"{NEWER}:polynomials", {}, False, {}),
    (f"{NEWER}:table", {}, False, {}),
    (f"{NEWER}:pose", {}, False, {}),
    (f"{NEWER}:style", {}, False, {}),
    (f"{NEWER}:kernels", {}, False, {}),
    (f"{NEWER}:temporal", {}, False, {}),
    ("torchvision:r2plus1d_18", {"batch": 8}, False, {}),
    ("timm:convmixer_768_32", {"batch": 32}, False, {}),
    ("timm:cait_xxs24_224", {"batch": 64}, False, {}),
    ("hf:deit", {"batch": 64}, False, {"num_hidden_layers": 6}),
    (
        "hf:gpt_bigcode",
        {"batch": 8, "seq": 512},
        False,
        {"n_layer": 6, "n_head": 16, "n_embd": 1024, "vocab_size": 32000},
    ),
    # From here on after those before had told calls of libraries from what else the host does.
    *(
        (f"{OTHER}:{name}", {}, False, {})
        for name in (
            "capsules weather speaker retention centres matches sets forecast ranking game molecules".split()
        )
    ),
    ("hf:qwen2", {"batch": 4, "seq": 1024}, False, _FOUR_LAYERS),
    # From here on after those before had set what the backward graph's tensors take.
    *(
        (f"{FRESH}:{name}", {}, False, {})
        for name in (
            "agent prototypes distances sentences imagined depths skeletons dynamics records".split()
        )
    ),
    ("torchvision:alexnet", {"batch": 128}, False, {}),
    # From here on after those before had set the fixed part of a step.
    *(
        (f"{HELD}:{name}", {}, False, {})
        for name in (
            "conformer naf tcn interest barlow deep_vae graphormer diffusion_transformer masked_autoencoder "
            "vocoder patch_series decisions yolo isomorphism"
        ).split()
    ),
    ("timm:visformer_tiny", {"batch": 64}, False, {}),
    ("timm:ese_vovnet19b_dw", {"batch": 64}, False, {}),
    ("hf:olmo2", {"batch": 4, "seq": 1024}, False, _FOUR_LAYERS),
    # From here on after those before had told how many kernels sums and norms take.
    *(
        (f"{HELD}:{name}", {}, False, {})
        for name in (
            "painter neighbours state_spaces film enlarged mixer diffusion_policy point_net contrast "
            "equivariant"
        ).split()
    ),
    ("timm:edgenext_small", {"batch": 64}, False, {}),
    ("timm:levit_128", {"batch": 128}, False, {}),
    ("hf:modernbert", {"batch": 16, "seq": 512}, False, {"num_hidden_layers": 6}),
    # From here on after tiny steps had told what the host does around a step's kernels.
    *(
        (f"{YOUNG}:{name}", {}, False, {})
        for name in (
            "windows_and_grids receptance queries gates soft_experts registers columns questions sage towers "
            "made_networks mixture factors sums sines skip_grams"
        ).split()
    ),
]
#: Those whose odd channels are padded, beside themselves as they are.
PADDED: list[tuple[str, dict[str, int], bool, dict[str, int]]] = [
    (f"{PADS}:{name}{fixed}", {}, False, {})
    for name in ("unet", "separable", "dense", "odd_cnn")
    for fixed in ("", "_padded", *(("_last", "_padded_last") if name == "unet" else ()))
]
#: Those that are to set what calls take of the host.
SETTING: list[tuple[str, dict[str, int], bool, dict[str, int]]] = [
    (f"{CALLS}:{name}", {}, False, {})
    for name in (
        "kernels plain_kernels many_kernels parameters many_parameters inputs many_inputs modules "
        "many_modules written written_apart products shared_products convolutions shared_convolutions "
        "depthwise convolutions_1d dilated_1d attentions breaks left scans scans_of_rows long_scans near "
        "nearer"
    ).split()
]

#: Forward passes of one sample.
SMALL: list[tuple[str, dict[str, int], bool]] = [
    ("hf:gpt2", {"batch": 1, "seq": 64}, False),
    ("hf:bert", {"batch": 1, "seq": 128}, False),
    ("hf:t5", {"batch": 1, "seq": 64}, False),
    ("hf:opt", {"batch": 1, "seq": 64}, False),
    ("hf:vit", {"batch": 1}, False),
    ("hf:swin", {"batch": 1}, False),
    ("torchvision:resnet50", {"batch": 1}, False),
    ("torchvision:mobilenet_v3_large", {"batch": 1}, False),
    ("timm:convnext_tiny", {"batch": 1}, False),
]
#: Those measured with bf16 weights too.
HALVED = ("hf:gpt2", "hf:bert", "hf:t5", "hf:vit", "torchvision:resnet50", "torchvision:mobilenet_v3_large")

#: What the reference step took on the host that the model's constants are of.
KNOWN_REFERENCE_S = 9.6e-3
#: What comes after a model's turns.
LOOK_INSIDE = -1


@dataclass(frozen=True)
class Run:
    """What is measured of a model: a training step under autocast, or the forward pass alone (``infer``),
    under autocast or with weights that are ``halved``."""

    target: str
    sizes: dict[str, int]
    channels_last: bool = False
    compiled: bool = False
    infer: bool = False
    halved: bool = False
    arguments: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name among the rows of a result."""
        one = ", one sample" if self.sizes.get("batch") == 1 else ""
        return label(self.target, self.sizes, self.channels_last) + one + ", bf16 weights" * self.halved

    def load(self, device: str) -> Target:
        """The model and its inputs, made on ``device``: meta, or the CPU."""
        options = TargetOptions(
            train=not self.infer, on_cpu=device == "cpu", arguments=self.arguments, **self.sizes
        )
        loaded = load(self.target, options)
        if not self.halved:
            return loaded
        inputs = tree_map(lambda t: t.bfloat16() if t.is_floating_point() else t, loaded.inputs)
        return replace(loaded, model=loaded.model.bfloat16(), inputs=inputs)


def runs(infer: bool, compiled: bool, further: bool = True) -> list[Run]:
    """What is measured, in order."""
    if not infer:
        more = [*COMPILED, *((*PREDICTED, *PADDED, *SETTING) if compiled else ())] if further else []
        return [
            *(Run(*entry, compiled=compiled) for entry in MODELS),
            *(Run(*entry, compiled=compiled, arguments=arguments) for *entry, arguments in more),
        ]
    halved = [Run(*entry, compiled, infer, halved=True) for entry in SMALL if entry[0] in HALVED]
    return [*(Run(*entry, compiled, infer) for entry in (*MODELS, *SMALL)), *halved]


def launches(step: Step, gpu: Gpu) -> dict[str, dict[str, int]]:
    """By part of the step: its operations, the kernels beyond the first of each, how often another module
    runs than before, and the parameters that have a gradient."""
    parts: dict[str, list[StepOp]] = {}
    for entry in step.ops:
        parts.setdefault(entry.phase.partition("-")[0], []).append(entry)
    return {
        part: {
            "operations": len(entries),
            "kernels": sum(launch(entry, gpu, step.settings).kernels - 1 for entry in entries),
            "modules": sum(1 for _ in groupby(entries, lambda entry: entry.site.module)),
            "parameters": sum(parameter.trainable for parameter in step.parameters.values()),
        }
        for part, entries in parts.items()
    }


def host_scale(rows: Iterable[dict[str, Any]]) -> float:
    """How much longer launching took in a run than on the host whose constants the cost model has, by the
    reference steps between the rows."""
    references_ms = statistics.median(min(row["reference_turns_ms"]) for row in rows)
    return references_ms / (1e3 * REFERENCE_STEP_S)


def captured(run: Run) -> Step:
    """The step as it is captured, on shapes."""
    shapes = run.load("meta")
    return capture(
        shapes.model,
        shapes.inputs,
        train=not run.infer,
        amp="" if run.halved else "bf16",
        loss=shapes.loss,
        channels_last=run.channels_last,
        compile=run.compiled,
    )


def predicted(run: Run, gpu: PricedGpu, scale: float) -> dict[str, Any]:
    step = captured(run)
    step = fuse(step) if run.compiled else step
    device = replace(gpu, run=MeasuredRun(Step(()), (), (), launch_scale=scale))
    estimate = estimate_step(step, device)
    alone = estimate_step(step, device, launch_scale=0.0)
    return {
        "own_gpu_ms": 1e3 * own_width_s(alone, device),
        "predicted_ms": 1e3 * estimate.time_s,
        "predicted_interval_ms": [1e3 * estimate.low_s, 1e3 * estimate.high_s],
        "predicted_gpu_ms": 1e3 * estimate.gpu_time_s,
        "predicted_host_ms": 1e3 * estimate.host_time_s,
        "predicted_gib": (step.memory.peak_bytes + converted_bytes(step, device)) / 2**30,
        "operations": len(step.ops),
        "launches": launches(step, device),
        "recompiled": step.settings.recompiled,
        "kinds": sorted({entry.op.kind for entry in step.ops}),
    }


class Measured:
    """A model that takes training steps, or forward passes, and what they took.

    Attributes:
        turns: Of each: wall time of steps, back to back and not, the host's time in the forward pass, the
            backward pass and the optimizer, and what the cost model's reference step took then.
        once: Kernels and memory of a step, which do not vary.
    """

    def __init__(self, run: Run, device: str) -> None:
        loaded = run.load("cpu")
        self.of = run
        self.device = device
        self.model = loaded.model.to(device).train(not run.infer)
        self.loss = loaded.loss
        inputs = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, loaded.inputs)
        if run.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
            inputs = tuple(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs)
        self.inputs = inputs
        self.optimizer = None if run.infer else torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.run = torch.compile(self.model) if run.compiled else self.model
        self.turns: list[dict[str, Any]] = []
        self.once: dict[str, Any] = {}

    def forward(self) -> Any:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=not self.of.halved):
            inputs = self.inputs
            output = self.run(**inputs) if isinstance(inputs, dict) else self.run(*inputs)
            if self.of.infer:
                return output
            loss = self.loss(output) if self.loss else getattr(output, "loss", output)
            return loss.mean() if loss.dim() else loss

    def step(self) -> list[float]:
        """The times at which the host has launched the forward pass, the backward pass and the optimizer."""
        passed = [time.perf_counter()]
        with torch.set_grad_enabled(not self.of.infer):
            loss = self.forward()
        passed.append(time.perf_counter())
        if self.optimizer:
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
        steps = 10 if self.of.infer else 5
        for _ in range(2):
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            self.synchronize()
            sustained.append(1e3 * (time.perf_counter() - start) / steps)
        after_ms = 1e3 * REFERENCE_STEP_S * launch_scale(torch.device(self.device))
        self.turns.append(
            {
                "wall_ms": statistics.median(times),
                "sustained_ms": min(sustained),
                # A host that runs ahead far enough has to wait for the GPU: of a GPU-bound step these say
                # little.
                "host_ms": [  # forward; backward, optimizer
                    1e3 * statistics.median(part)
                    for part in zip(*(map(sub, p[1:], p) for p in launched), strict=True)
                ],
                "reference_ms": reference_ms,
                "after_ms": after_ms,
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
        states = self.optimizer.state.values() if self.optimizer else ()
        state = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        leaves = [*self.model.parameters(), *self.model.buffers(), *state, *tree_leaves(self.inputs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def row(self) -> dict[str, Any]:
        return {
            "wall_ms": min(turn["wall_ms"] for turn in self.turns),
            "sustained_ms": min(turn["sustained_ms"] for turn in self.turns),
            "host_ms": [min(parts) for parts in zip(*(turn["host_ms"] for turn in self.turns), strict=True)],
            "sustained_turns_ms": [turn["sustained_ms"] for turn in self.turns],
            "host_turns_ms": [turn["host_ms"] for turn in self.turns],
            "reference_turns_ms": [turn["reference_ms"] for turn in self.turns],
            "after_turns_ms": [turn["after_ms"] for turn in self.turns],
            **self.once,
        }


def _short(name: str) -> str:
    return name if len(name) <= 160 else name[:120] + "…" + name[-39:]


def held_out(model: str) -> bool:
    """Whether a compiled step sets no constant and no mechanism of the cost model: every other one, by name,
    but for the first of all, which had set some before; and those that were predicted last, since those
    before them set what the host takes. Chosen before the errors of the others were known."""
    listed = [run.label for run in runs(False, True)]
    before = len(MODELS) + len(COMPILED)
    names = sorted(listed[FIRST_COMPILED:before])
    return model in (*names[1::2], *listed[before + FIRST_PREDICTED : before + len(PREDICTED)])


def predict_again(recorded: list[Path], device: PricedGpu, calibrated: bool, out: Path | None) -> None:
    """Predict recorded steps with the cost model as it stands and print how far off it is.

    Args:
        device: The GPU that they ran on.
        calibrated: Its launch scale counts for every step; else the one that was measured beside the steps.
    """
    result: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for path in recorded:
        result = json.loads(path.read_text())
        known = {run.label: run for run in runs(result.get("infer", False), result.get("compiled", False))}
        measured = [row for row in result["rows"] if "gpu_ms" in row]
        # The first training steps were measured on the very host that the constants are for. Others took up
        # to 1.5 times as long from one model to the next.
        known_host = (result["gpu"], result.get("infer"), result["compiled"]) == ("NVIDIA H200", None, False)
        each = (
            not known_host
            and not result.get("infer")
            and all("reference_turns_ms" in row for row in measured)
        )
        each = each and not calibrated
        timed = [row for row in measured if "reference_turns_ms" in row]
        scale = KNOWN_REFERENCE_S / REFERENCE_STEP_S if known_host or not timed else host_scale(timed)
        scale = device.launch_scale if calibrated else scale
        result["host_scale"] = "each row's" if each else scale
        result["calibration"] = device.calibration_title
        result["predicted_with"] = {
            name: version(name) for name in ("torch", "transformers", "torchvision", "timm")
        }
        made = result.get("transformers")
        if made and made != version("transformers"):
            print(
                f"{path.name} was measured with transformers {made}, and predicted with "
                f"{version('transformers')}: a model may have changed in between."
            )
        print(f"The host's time over what the model assumes: {result['host_scale']}.")
        for row in measured:
            run = known[row["model"]]
            row.update(predicted(run, device, host_scale([row]) if each else scale))
            row.update(errors(row))
            print(
                f"{row['model']:46} GPU {row['predicted_gpu_ms']:7.2f} of {row['gpu_ms']:7.2f} ms "
                f"({row['error_gpu']:+.1%})  step {row['predicted_ms']:7.2f} of {row['sustained_ms']:7.2f} "
                f"ms ({row['error_wall']:+.1%})  memory {row['predicted_gib']:6.2f} of "
                f"{row['peak_gib']:6.2f} GiB"
                + " held out"
                * row.setdefault("held_out", run.compiled and held_out(run.label)),
                flush=True,
            )
        rows += measured
    result.update(summed_up(rows, "all"))
    for which, apart in (("the others", False), ("held out", True)):
        part = [row for row in rows if row["held_out"] == apart]
        if 0 < len(part) < len(rows):
            summed_up(part, which)
    if out and calibrated:
        # The steps are in other files: here is what the calibration says of them, and of itself.
        assert device.calibration is not None
        brief = (
            "model",
            "gpu_ms",
            "sustained_ms",
            "predicted_gpu_ms",
            "predicted_ms",
            "error_gpu",
            "error_wall",
        )
        result = {
            "steps": [path.name for path in recorded],
            "calibration": device.calibration.about,
            **summed_up(rows, "all"),
            "rows": [{name: row[name] for name in brief} for row in rows],
        }
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


def summed_up(rows: list[dict[str, Any]], which: str) -> dict[str, float]:
    """Medians and maxima of the errors, printed too."""
    found = {}
    for kind in ("gpu", "wall", "memory"):
        off = sorted(abs(row[f"error_{kind}"]) for row in rows)
        found[f"median_error_{kind}"] = statistics.median(off)
        found[f"worst_error_{kind}"] = off[-1]
        print(
            f"{which}, {kind}: median {statistics.median(off):.1%}, worst {off[-1]:.1%} of {len(off)} steps"
        )
    return found


def label(target: str, sizes: dict[str, int], channels_last: bool) -> str:
    name = target.replace(str(EXAMPLES), "examples/models.py").replace(f"{FURTHER.parent}/", "")
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
    parser.add_argument("--only", nargs="+", default=[""], help="measure runs of these names, or parts")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile")
    parser.add_argument("--infer", action="store_true", help="the forward pass alone")
    parser.add_argument("--further", action="store_true", help="eager, those of the compiled ones too")
    parser.add_argument("--turns", type=int, default=5, help="how often each model is measured")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start nothing further after this time")
    parser.add_argument("--calibration", type=Path, help="predict by this calibration of the GPU")
    parser.add_argument("--left-out", action="store_true", help="predict as if the GPU were not measured")
    parser.add_argument("--slow", type=float, default=1, help="times as slow a host (slow_host.py)")
    parser.add_argument("--measured", type=Path, nargs="+", help="predict the steps recorded in these files")
    options = parser.parse_args()
    if options.measured:
        if options.out and len(options.measured) > 1 and not options.calibration:
            parser.error("--out takes the rows of one file")
        named = options.calibration
        device = left_out(get(options.gpu)) if options.left_out else priced(options.gpu, named)
        predict_again(options.measured, device, named is not None, options.out)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures on a GPU, and PyTorch finds none here.")
    start = time.perf_counter()
    models: dict[str, Measured] = {}
    rows: dict[str, dict[str, Any]] = {}
    wanted = [
        run
        for run in runs(options.infer, options.compiled, options.compiled or options.further)
        if any(part in run.label for part in options.only)
    ]
    turns = range(options.turns)
    if options.compiled:
        schedule = [(run, turn) for run in wanted for turn in (*turns, LOOK_INSIDE)]
    else:
        schedule = [(run, turn) for turn in (*turns, LOOK_INSIDE) for run in wanted]
    for run, turn in schedule:
        name = run.label
        row = rows.get(name, {})
        is_late = time.perf_counter() - start > options.budget_s
        if "failure" in row or (turn == LOOK_INSIDE and not row) or (turn != LOOK_INSIDE and is_late):
            continue
        # A step that the GPU bounds takes the same whatever else the host does.
        if turn not in (0, 1, LOOK_INSIDE) and row["wall_ms"] > 1.5 * sum(row["host_ms"]):
            continue
        try:
            if name not in models:
                models[name] = Measured(run, options.device)
            if turn == LOOK_INSIDE:
                models[name].look_inside()
            else:
                with slowed(options.slow):
                    models[name].turn()
            rows[name] = {"model": name, **run.sizes, **models[name].row()}
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
                "driver": driver_version(),
                "torch": torch.__version__,
                "transformers": version("transformers"),
                "compiled": options.compiled,
                "infer": options.infer,
                "slow": options.slow,
                "rows": list(rows.values()),
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
