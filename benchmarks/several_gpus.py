"""Collectives and training steps on the GPUs of a machine, beside what tilefit predicts for them.

    PYTHONPATH=src python benchmarks/several_gpus.py --rows several_gpus.jsonl --seconds 480
    PYTHONPATH=src python benchmarks/several_gpus.py --rows several_gpus.jsonl --compare

The first runs on two GPUs of one machine and writes a row as soon as it is measured: medians of ten steps
back to back and of four after each of which the host waits, the allocator's peaks, and what a profiled step
consists of. Processes that do not answer are ended, and the rows after theirs go on with others.
``--device cpu`` tries it with gloo at tiny sizes. The second needs no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tilefit import gpus
from tilefit.capture import capture
from tilefit.capture.torchvision_import import tolerated
from tilefit.cost.links import Fabric, Group
from tilefit.cost.priced import priced
from tilefit.errors import TilefitError
from tilefit.measure.collectives import SIZES, measure
from tilefit.measure.ranks import Ranks
from tilefit.options import StepOptions
from tilefit.parallel.blocks import Framework, Model
from tilefit.parallel.planning import Job, Planner, Priced, precision_of
from tilefit.parallel.training import CONTEXT_BYTES, Precision, TrainingSplit

RESULTS = Path(__file__).parent / "results" / "several_gpus.json"
WARM, TIMED, SYNCED, PROFILED = 3, 10, 4, 2
#: Heads, key and value heads, width, of the feed-forward part, vocabulary, layers.
LLAMA = {"llama-1b": (32, 8, 2048, 8192, 128256, 16), "llama-8b": (32, 8, 4096, 14336, 128256, 32)}


@dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
        model: ``gpt2``, ``resnet50``, ``llama-1b``; ``llama-8b`` are layers alone, with bf16 weights.
        way: ``one`` GPU, ``ddp``, ``fsdp``, ``tp``, ``pp``.
        samples: Of a micro-batch on each GPU; of a pipeline, on all.
        seq: Tokens of a sample.
        parts: Micro-batches.
        layers: Of ``llama-8b``.
        reshard: FSDP frees parameters after the forward pass.
        checkpoint: Layers are computed again in the backward pass.
        sequence: Tensor-parallel ranks share the sequence, too.
        schedule: Of the pipeline.
    """

    model: str
    way: str
    samples: int
    seq: int = 0
    parts: int = 1
    layers: int = 0
    reshard: bool = True
    checkpoint: bool = False
    sequence: bool = False
    schedule: str = "1F1B"

    @property
    def gpus(self) -> int:
        return 1 if self.way == "one" else 2

    @property
    def name(self) -> str:
        told = [self.model, self.way, f"{self.samples}" + (f"x{self.seq}" if self.seq else "")]
        told += [f"{self.parts} parts"] if self.parts > 1 else []
        told += [f"{self.layers} layers"] if self.layers else []
        told += ["keep"] if not self.reshard else []
        told += ["checkpoint"] if self.checkpoint else []
        told += ["sequence"] if self.sequence else []
        told += [self.schedule] if self.way == "pp" else []
        return " ".join(told)


G, R, L, B = "gpt2", "resnet50", "llama-1b", "llama-8b"
#: By kind; the processes are fresh for each.
CASES: dict[str, list[Case]] = {
    "ddp": [
        Case(G, "ddp", 32, 1024),
        Case(G, "one", 32, 1024),
        Case(G, "ddp", 4, 1024),
        Case(G, "one", 4, 1024),
        Case(R, "ddp", 256),
        Case(R, "one", 256),
        Case(R, "ddp", 32),
        Case(R, "one", 32),
        Case(G, "ddp", 8, 1024, parts=4),
        Case(G, "one", 8, 1024, parts=4),
        Case(R, "ddp", 8),
        Case(R, "one", 8),
        Case(L, "ddp", 4, 2048),
    ],
    "fsdp": [
        Case(L, "fsdp", 4, 2048),
        Case(L, "one", 4, 2048),
        Case(L, "fsdp", 4, 2048, reshard=False),
        Case(L, "fsdp", 1, 1024),
        Case(L, "one", 1, 1024),
        Case(L, "fsdp", 1, 1024, reshard=False),
        Case(L, "fsdp", 8, 2048, checkpoint=True),
        Case(L, "one", 8, 2048, checkpoint=True),
        Case(L, "fsdp", 2, 2048, parts=4),
    ],
    "tp": [
        Case(B, "tp", 1, 4096, layers=4),
        Case(B, "one", 1, 4096, layers=4),
        Case(B, "tp", 4, 4096, layers=4),
        Case(B, "one", 4, 4096, layers=4),
        Case(B, "tp", 1, 4096, layers=4, sequence=True),
        Case(B, "tp", 4, 4096, layers=4, sequence=True),
        Case(B, "tp", 1, 512, layers=4),
        Case(B, "one", 1, 512, layers=4),
    ],
    "pp": [
        Case(B, "pp", 1, 2048, parts=8, layers=8),
        Case(B, "pp", 1, 2048, parts=8, layers=8, schedule="GPipe"),
        Case(B, "pp", 1, 2048, parts=2, layers=8),
        Case(B, "one", 1, 2048, parts=8, layers=8),
        Case(B, "pp", 2, 4096, parts=4, layers=4),
        Case(B, "one", 2, 4096, parts=4, layers=4),
    ],
}


# ---- models ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, hidden: int, seq: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.head, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.head, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        angles = torch.outer(torch.arange(seq).float(), 5e5 ** -(torch.arange(0, self.head, 2) / self.head))
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-second, first], -1) * self.sin.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)  # of a tensor-parallel rank: some of the heads
        q, k, v = (each.view(*each.shape[:2], -1, self.head).transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.o(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, heads: int, kv_heads: int, hidden: int, wide: int, seq: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.mlp = Attention(heads, kv_heads, hidden, seq), Mlp(hidden, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Layers(nn.Module):
    """Some layers of a Llama; the loss is as good as any."""

    def __init__(self, sizes: tuple[int, ...], layers: int, seq: int, *, ends: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*sizes, seq) for _ in range(layers))
        self.ends = ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return squares(x) if self.ends else x


def squares(x: torch.Tensor, target: object = None) -> torch.Tensor:
    return x.float().square().mean()


class Llama(nn.Module):
    def __init__(self, sizes: tuple[int, ...], vocab: int, layers: int, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, sizes[2])
        self.layers = nn.ModuleList(Layer(*sizes, seq) for _ in range(layers))
        self.norm = nn.RMSNorm(sizes[2])
        self.head = nn.Linear(sizes[2], vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Gpt2(nn.Module):
    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        with tolerated():
            from transformers import GPT2Config, GPT2LMHeadModel
        self.model = GPT2LMHeadModel(GPT2Config(**sizes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with tolerated():
            from torchvision.models import resnet50
        self.model = resnet50().to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            self.model(images), torch.zeros(len(images), dtype=torch.long, device=images.device)
        )


def build(case: Case, tiny: bool, layers: int = 0) -> nn.Module:
    """The model of a case, or ``layers`` of it, on the default device."""
    if case.model == "gpt2":
        return Gpt2(
            {"n_layer": 2, "n_embd": 64, "n_head": 2} if tiny else {"n_layer": layers} if layers else {}
        )
    if case.model == "resnet50":
        return Resnet()
    *sizes, vocab, count = LLAMA[case.model]
    if tiny:
        sizes, vocab, count = [4, 2, 64, 128], 512, 2
    if case.model == "llama-8b":
        made = Layers(tuple(sizes), layers or case.layers, case.seq)
        return made.to(torch.bfloat16)
    return Llama(tuple(sizes), vocab, layers or count, case.seq)


def data(case: Case, tiny: bool, samples: int = 0) -> torch.Tensor:
    """The input of a micro-batch, on the default device."""
    samples = samples or case.samples
    if case.model == "resnet50":
        side = 32 if tiny else 224
        return torch.randn(samples, 3, side, side).to(memory_format=torch.channels_last)
    if case.model == "llama-8b":
        hidden = 64 if tiny else LLAMA["llama-8b"][2]
        return torch.randn(samples, case.seq, hidden).to(torch.bfloat16)
    return torch.randint(0, 512, (samples, case.seq))


# ---- a step on a rank -----------------------------------------------------------------------------


def checkpointed(model: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def sharded(model: nn.Module, case: Case) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=case.reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=case.reshard)
    return model


def tensor_parallel(model: nn.Module, case: Case, device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device, (2,))
    place = Shard(1) if case.sequence else Replicate()
    whole = PrepareModuleInput(input_layouts=(place,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {"attention": whole, "mlp": whole}
    plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: RowwiseParallel(output_layouts=place) for name in ("attention.o", "mlp.down")}
    if case.sequence:
        plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def pipeline(model: nn.Module, case: Case, device: torch.device, x: torch.Tensor) -> Callable[[], None]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank = dist.get_rank()
    half = len(model.layers) // 2
    model.layers = model.layers[half:] if rank else model.layers[:half]
    model.ends = False
    stage = PipelineStage(model, rank, 2, device)
    kind = Schedule1F1B if case.schedule == "1F1B" else ScheduleGPipe
    schedule = kind(stage, case.parts, loss_fn=squares)
    batch = x.repeat(case.parts, 1, 1)
    return lambda: schedule.step(target=batch) if rank else schedule.step(batch)


def step_of(case: Case, device: torch.device, tiny: bool) -> tuple[Callable[[], None], nn.Module]:
    """A step on this rank, and its model."""
    torch.manual_seed(0)
    with device:
        model, x = build(case, tiny), data(case, tiny)
    if case.checkpoint:
        checkpointed(model)
    work: Callable[[], None] | None = None
    trained = model
    if case.way == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        trained = nn.parallel.DistributedDataParallel(model, device_ids=ids)
    elif case.way == "fsdp":
        trained = sharded(model, case)
    elif case.way == "tp":
        if case.sequence:
            x = x.chunk(2, 1)[dist.get_rank()].contiguous()
        trained = tensor_parallel(model, case, device.type)
    elif case.way == "pp":
        work = pipeline(model, case, device, x)
    # A kernel of the optimizer takes either distributed tensors or plain ones.
    kinds: dict[type, list[nn.Parameter]] = defaultdict(list)
    for parameter in trained.parameters():
        kinds[type(parameter.data)].append(parameter)
    groups = [{"params": each} for each in kinds.values()]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
    autocast = case.way != "fsdp" and case.model != "llama-8b"

    def passes() -> None:
        for part in range(case.parts):
            last = part == case.parts - 1
            if case.way == "ddp":
                trained.require_backward_grad_sync = last  # what ``no_sync`` sets
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = trained(x)
            loss.backward()

    def step() -> None:
        (work or passes)()
        optimizer.step()
        optimizer.zero_grad()

    return step, trained


def run(case: Case, kind: str, tiny: bool) -> dict[str, Any]:
    """Measure a case on this rank."""
    if case.gpus == 1 and dist.get_rank():
        return {}
    cuda = kind == "cuda"
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    synchronize: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    meet: Callable[[], object] = dist.barrier if case.gpus > 1 else lambda: None
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step, model = step_of(case, device, tiny)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for _ in range(WARM):
        step()
    synchronize()
    if cuda:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found["held_bytes"] = held
    meet()
    synchronize()
    began_s = time.perf_counter()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)] if cuda else []
    if cuda:
        events[0].record()
    for index in range(TIMED):
        step()
        if cuda:
            events[index + 1].record()
    launched_s = time.perf_counter() - began_s
    synchronize()
    found["mean_s"] = (time.perf_counter() - began_s) / TIMED
    found["launched_s"] = launched_s / TIMED
    if cuda:
        steps = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
        found |= {"median_s": statistics.median(steps), "steps_s": steps}
    synced = []
    for _ in range(SYNCED):
        meet()
        synchronize()
        began_s = time.perf_counter()
        step()
        synchronize()
        synced.append(time.perf_counter() - began_s)
    found["synced_s"] = statistics.median(synced)
    if cuda:
        free, total = torch.cuda.mem_get_info()
        found |= {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "used_bytes": total - free,
        }
    meet()
    found["profile"] = profiled(step, cuda)
    return found


# ---- a profiled step ------------------------------------------------------------------------------


def profiled(step: Callable[[], None], cuda: bool) -> dict[str, Any]:
    """What the GPU does in some steps: busy with what, for how long, in seconds."""
    if not cuda:
        for _ in range(PROFILED):
            step()
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as made:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    try:
        return summed(made.events())
    except (AttributeError, RuntimeError, ValueError) as error:  # the times above are worth more
        return {"error": f"{type(error).__name__}: {error}"}


def summed(events: Iterable[Any]) -> dict[str, Any]:
    """Kernels of all steps."""
    link: list[tuple[float, float]] = []
    own: list[tuple[float, float]] = []
    sums: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or event.time_range.elapsed_us() <= 0:
            continue
        if getattr(event, "is_user_annotation", False) or event.name.startswith(("nccl:", "FSDP::")):
            continue
        times = event.time_range.start * 1e-6, event.time_range.end * 1e-6
        (link if "nccl" in event.name.lower() else own).append(times)
        sums[event.name[:120]].append(times[1] - times[0])
    both = union([*link, *own])
    top = sorted(sums.items(), key=lambda pair: -sum(pair[1]))[:40]
    every = [*link, *own]
    return {
        "steps": PROFILED,
        "span_s": max((b for _, b in every), default=0.0) - min((a for a, _ in every), default=0.0),
        "compute_s": union(own),
        "link_s": union(link),
        "busy_s": both,
        "kernels": len(own),
        "messages": len(link),
        "top": [[name, len(times), sum(times)] for name, times in top],
        "nccl": {
            name: [round(1e6 * each, 1) for each in times[:200]]
            for name, times in sums.items()
            if "nccl" in name.lower()
        },
    }


def union(spans: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


# ---- what is predicted ----------------------------------------------------------------------------


def captured(case: Case, *, short: bool) -> Model:
    """The model of a case from two of its layers and two samples; with ``short`` weights, in bf16."""
    with torch.device("meta"):
        model, x = build(case, False, 2), data(case, False, 2)
    layers = {"gpt2": 12, "resnet50": 0, "llama-8b": case.layers}.get(case.model, LLAMA["llama-1b"][-1])
    amp = "off" if short else "bf16"
    options = StepOptions(amp=amp, fused_optimizer=True)
    name = {"resnet50": "images", "llama-8b": "x"}.get(case.model, "tokens")
    model = model.to(torch.bfloat16) if short else model
    return Model(capture(model, {name: x}, options=options, loss=lambda loss: loss), layers)


@cache
def planner(case: Case, scale: float) -> Planner:
    """Prices a case of two GPUs of a machine whose host launches in ``scale`` of the time assumed."""
    layers_alone = case.model == "llama-8b"
    model = captured(case, short=layers_alone or case.way == "fsdp")
    precision = Precision(2, 2, 2, 4) if layers_alone else precision_of(model.step)
    gpu = priced("h200")
    gpu = replace(gpu, calibration=replace(gpu.calibration, launch_scale=scale))
    framework = Framework(sequence=case.sequence)
    return Planner(model, Fabric(gpu, 2), Job(case.samples, precision, framework))


def predicted(case: Case, scale: float = 1.0) -> Priced:
    """Time and memory of a case, as ``tilefit plan`` prices them."""
    split = TrainingSplit(
        tensor=2 if case.way == "tp" else 1,
        pipeline=2 if case.way == "pp" else 1,
        data=2 if case.way in ("ddp", "fsdp") else 1,
        micro_batches=case.parts,
        zero=(3 if case.reshard else 2) if case.way == "fsdp" else 0,
        samples=case.samples,
        checkpoint="full" if case.checkpoint else "none",
        gpipe=case.schedule == "GPipe",
    )
    return planner(case, scale).priced(split)


def compared(path: Path) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Measured and predicted, a line for each step; and the errors."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    gpu, lines, off = gpus.get("h200"), [], defaultdict(list)
    for row in rows:
        if row["row"] == "collective" and row["size_bytes"] >= 64 * 1024:
            group = Group(row["ranks"], row["ranks"])
            ratio = Fabric(gpu).time_s(row["function"], row["size_bytes"], group, sums=False) / row["time_s"]
            off[f"collectives, {row['function']}"].append(abs(ratio - 1))
            off["collectives"].append(abs(ratio - 1))
    scale = next((row["launch_scale"] for row in rows if row["row"] == "host"), 1.0)
    for row in rows:
        if row["row"] != "step" or "error" in row:
            continue
        case = Case(**row["case"])
        found = predicted(case, scale)
        measured_s, peak = row["median_s"], max(each["peak_bytes"] for each in (row, *row["others"]))
        memory = found.memory.total - CONTEXT_BYTES
        time = found.time
        parts = {name: 1e3 * value for name, value in asdict(time).items() if value > time.time_s / 100}
        told = ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in parts.items())
        lines.append(
            f"{case.name:34} {1e3 * measured_s:8.1f} ms {time.time_s / measured_s:5.2f}   "
            f"{peak / 2**30:6.2f} GiB {memory / peak:5.2f}   {told}"
        )
        kind = "one GPU" if case.gpus == 1 else "two GPUs"
        off[f"steps, {kind}"].append(abs(time.time_s / measured_s - 1))
        if row["profile"]["busy_s"] / row["profile"]["steps"] > 0.9 * measured_s:  # the host is ahead
            off[f"steps, {kind}, limited by the GPU"].append(abs(time.time_s / measured_s - 1))
        off[f"memory, {kind}"].append(abs(memory / peak - 1))
    report = {
        name: {
            "rows": len(each),
            "median": round(statistics.median(each), 3),
            "p90": round(sorted(each)[int(0.9 * len(each))], 3),
            "worst": round(max(each), 3),
        }
        for name, each in off.items()
    }
    return lines, report


# ---- on the machine -------------------------------------------------------------------------------


def machine(kind: str) -> dict[str, Any]:
    """What the rows depend on."""
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": kind,
    }
    for name in ("transformers", "torchvision"):
        from importlib.metadata import PackageNotFoundError, version

        try:
            about[name] = version(name)
        except PackageNotFoundError:
            about[name] = ""
    if kind == "cuda":
        from tilefit.measure.clocks import driver_version

        about |= {
            "gpu": subprocess.run(
                ["nvidia-smi", "--query-gpu=name,clocks.max.sm,power.limit", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=30, check=False,
            ).stdout.strip().splitlines(),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvls": os.environ.get("NCCL_NVLS_ENABLE", ""),
            "topology": subprocess.run(
                ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
            ).stdout,
        }  # fmt: skip
    return about


def host(kind: str) -> dict[str, float]:
    """How fast this host launches, over the one whose constants the model has."""
    from tilefit.measure.launch import launch_scale

    if dist.get_rank():
        return {}
    return {"launch_scale": launch_scale(torch.device(kind, 0) if kind == "cuda" else torch.device(kind))}


class Rows:
    """The file of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began_s = time.monotonic()

    def write(self, kind: str, **row: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"row": kind, **row}) + "\n")
        brief = {
            key: row[key]
            for key in ("name", "function", "size_bytes", "time_s", "median_s", "synced_s", "error")
            if key in row
        }
        print(f"{time.monotonic() - self.began_s:4.0f} s {kind} {brief}", flush=True)


def measured(options: argparse.Namespace) -> None:
    """Everything that the time allows, the collectives first."""
    rows = Rows(options.rows)
    tiny = options.device == "cpu"
    rows.write("machine", **machine(options.device))
    sizes = SIZES[:6] if tiny else SIZES
    left = lambda: options.seconds - (time.monotonic() - rows.began_s)  # noqa: E731
    kinds = [each for each in ("collectives", *CASES) if not options.only or each in options.only]
    for kind in kinds:
        waiting = list(CASES.get(kind, []))
        if tiny:
            waiting = [replace(case, seq=32 if case.seq else 0, samples=2) for case in waiting]
        collectives = kind == "collectives"
        while (waiting or collectives) and left() > 25:
            try:
                with Ranks(2, options.device) as ranks:
                    if collectives:
                        collectives = False
                        rows.write("host", **ranks.call(host, options.device)[0])
                        for each in measure(ranks, sizes):
                            rows.write("collective", **asdict(each))
                    while waiting and left() > 15:
                        case = waiting.pop(0)
                        limit_s = min(options.limit, left() - 5)
                        try:
                            answers = ranks.call(run, case, options.device, tiny, timeout_s=limit_s)
                        except TilefitError as error:
                            rows.write("step", name=case.name, case=asdict(case), error=str(error)[:600])
                            break
                        first, *others = answers
                        key = "median_s" if "median_s" in first else "mean_s"
                        times = {key: max(each[key] for each in answers if each)}
                        rows.write(
                            "step",
                            name=case.name,
                            case=asdict(case),
                            **{**first, **times},
                            others=[
                                {k: v for k, v in each.items() if k != "steps_s"} for each in others if each
                            ],
                        )
            except TilefitError as error:
                rows.write("failed", kind=kind, error=str(error)[:600])
    rows.write("end", seconds=time.monotonic() - rows.began_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="written to, or compared")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which nothing more is begun")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a step's row may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", choices=("collectives", *CASES), default=())
    parser.add_argument("--record", action="store_true", help="write the errors into results/")
    parser.add_argument("--compare", action="store_true", help="with predictions; measures nothing")
    options = parser.parse_args()
    if options.compare:
        lines, report = compared(options.rows)
        print("\n".join(lines), json.dumps(report, indent=1), sep="\n")
        if options.record:
            RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    else:
        measured(options)


if __name__ == "__main__":
    main()
