"""How far off predicted steps on several GPUs are, against published ones.

    PYTHONPATH=src python benchmarks/multi_gpu_steps.py --steps multi_gpu_steps.csv.gz [--record]

The table is not part of this project: a CSV with a row for each measured step (nanotron's
ultrascale-playbook, vTrain, llm-foundry, torchtitan), or run that ran out of memory. Models are built here as
their framework runs them, captured with two layers, and split as the row says. What was fitted to them is
said where it stands: to nanotron's Llama-1B, to MPT-125m, and to vTrain's narrow models. All other rows set
nothing.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.capture import capture
from tilefit.cost import attention
from tilefit.cost.links import NETWORKS, Fabric, Network
from tilefit.cost.priced import priced
from tilefit.gpus import Gpu
from tilefit.ops import Attention
from tilefit.options import StepOptions
from tilefit.parallel.blocks import Framework, Model
from tilefit.parallel.choices import TrainingSplit
from tilefit.parallel.planning import Job, Planner, Priced, precision_of
from tilefit.parallel.training import CONTEXT_BYTES, Training

RESULTS = Path(__file__).parent / "results" / "multi_gpu_steps.json"
Row = dict[str, str]


# ---- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; ``gated`` is Llama's, else GPT's and MPT's; ``copied`` is nanotron's, ``eager``
    torchtitan's."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = False
    bias: bool = False
    written: bool = False
    dropout: float = 0.0
    causal: bool = True
    copied: bool = False
    eager: bool = False


class ComposedNorm(nn.Module):
    """``nn.RMSNorm`` before PyTorch had a kernel for it: one for each operation, in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).type_as(x) * self.weight


def norm_of(shape: Shape) -> type[nn.Module]:
    """The norm of a decoder."""
    return ComposedNorm if shape.eager else nn.RMSNorm if shape.gated else nn.LayerNorm


class Layer(nn.Module):
    """A decoder layer with merged projections and fused norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.head = shape.hidden // shape.heads
        kv = shape.kv_heads or shape.heads
        norm = norm_of(shape)
        ffn = shape.ffn or 4 * shape.hidden
        self.norm_1, self.norm_2 = norm(shape.hidden), norm(shape.hidden)
        self.sizes = [shape.heads * self.head, kv * self.head, kv * self.head]
        self.qkv = self.wide(self.sizes)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=shape.bias)
        self.up = self.wide([ffn] * (2 if shape.gated else 1))
        self.down = nn.Linear(ffn, shape.hidden, bias=shape.bias)

    def wide(self, sizes: list[int]) -> nn.ModuleList:
        """Projections of one input: merged, but for torchtitan's."""
        sizes = sizes if self.shape.eager else [sum(sizes)]
        return nn.ModuleList(nn.Linear(self.shape.hidden, size, bias=self.shape.bias) for size in sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        kv = self.shape.kv_heads or self.shape.heads
        normed = self.norm_1(x)
        parts = [each(normed) for each in self.qkv]
        if self.shape.copied:  # queries, keys and values apart, then keys and values side by side
            qkv = parts[0].view(batch, seq, 3, -1, self.head).permute(2, 0, 1, 3, 4).contiguous()
            q, (k, v) = qkv[0], torch.stack([qkv[1], qkv[2]]).permute(1, 2, 0, 3, 4).contiguous().unbind(2)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        else:
            parts = parts if self.shape.eager else list(parts[0].split(self.sizes, -1))
            q, k, v = (part.view(batch, seq, -1, self.head).transpose(1, 2) for part in parts)
        if self.shape.eager:  # complex numbers of fp32; each head of keys and values as often as it is read
            q, k = ((each.float() * cos).type_as(each) for each in (q, k))
            k, v = (each.repeat_interleave(self.shape.heads // kv, 1) for each in (k, v))
        elif self.shape.gated:  # one kernel each, as flash-attention's rotary embedding
            q, k = q * cos, k * cos
        if self.shape.written:
            return self.rest(x, self.attended(q, k, v))
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.shape.causal, enable_gqa=k.shape[1] != self.shape.heads
        )
        return self.rest(x, attended.transpose(1, 2).reshape(batch, seq, -1))

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention as two products with a softmax of one kernel between them, and dropout."""
        batch, heads, seq, head = q.shape
        q, k, v = (each.reshape(batch * heads, seq, head) for each in (q, k, v))
        shares = F.dropout(F.softmax(torch.bmm(q, k.transpose(1, 2)), -1), self.shape.dropout, training=True)
        return torch.bmm(shares, v).view(batch, heads, seq, head).transpose(1, 2).reshape(batch, seq, -1)

    def rest(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What follows attention."""
        x = x + self.out(attended)
        normed = self.norm_2(x)
        wide = [each(normed) for each in self.up]
        if self.shape.gated:
            gate, up = wide if self.shape.eager else wide[0].chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(wide[0], approximate="tanh"))


class ShardedLoss(torch.autograd.Function):
    """nanotron's loss of logits that ranks share, kernel by kernel, on one rank."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        shares = logits - logits.max(-1)[0].unsqueeze(-1)
        rows = torch.arange(len(target), device=target.device)
        picked = shares[rows, target]
        total = shares.exp_().sum(-1)
        ctx.save_for_backward(shares.div_(total.unsqueeze(-1)), rows, target)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        shares, rows, target = ctx.saved_tensors
        shares[rows, target] -= 1.0
        return shares.mul_(grads[0].unsqueeze(-1)), None


class Decoder(nn.Module):
    """A decoder with its loss."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.shape = shape
        self.norm = norm_of(shape)(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("cos", torch.empty(8192 * 32, shape.hidden // shape.heads), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        cos = self.cos[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos)
        logits = self.head(self.norm(x))
        if self.shape.copied:
            return ShardedLoss.apply(logits.float().flatten(0, 1), tokens.flatten()).mean()
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@cache
def model(shape: Shape, seq: int, amp: str) -> Model:
    """The captured step of a decoder: two layers, two samples."""
    with torch.device("meta"):
        made = Decoder(shape, 2)
        tokens = torch.empty(2, seq, dtype=torch.int64)
    if not amp:
        made = made.to(torch.bfloat16)
    options = StepOptions(amp=amp or "off", fused_optimizer=True)  # type: ignore[arg-type]
    return Model(capture(made, {"tokens": tokens}, options=options, loss=lambda loss: loss), shape.layers)


@cache
def planner(
    shape: Shape,
    seq: int,
    gpu: str | Gpu,
    network: str | Network,
    batch: int,
    framework: Framework | None = None,
    copies: int = 0,
) -> Planner:
    """The planner of a model in bf16 over machines of eight GPUs."""
    found = model(shape, seq, "")
    job = Job(batch, replace(precision_of(found.step), copies=copies), framework or Framework())
    net = NETWORKS[network] if isinstance(network, str) else network
    return Planner(found, Fabric(priced(gpu) if isinstance(gpu, str) else gpu, 8, net), job)


# ---- rows -----------------------------------------------------------------------------------------

#: Keys and values have as many heads as queries: nanotron's ``scripts/scaling_benchmarks.py``.
NANOTRON = {
    "Llama-1B": Shape(16, 2048, 32, 131072, 8192, gated=True, tied=True, copied=True),
    "Llama-8B": Shape(32, 4096, 32, 131072, 14336, gated=True, copied=True),
}
MPT = {
    "MPT-125m": (12, 768, 12),
    "MPT-350m": (24, 1024, 16),
    "MPT-760m": (24, 1536, 12),
    "MPT-1b": (24, 2048, 16),
    "MPT-3b": (32, 2560, 20),
    "MPT-7b": (32, 4096, 32),
    "MPT-13b": (40, 5120, 40),
    "MPT-30b": (48, 7168, 56),
    "MPT-70b": (80, 8192, 64),
}
#: Its power is limited to 500 W, that of the GPUs whose times are known to 700 W. Power beyond what a GPU
#: draws that waits goes with the clock and the square of the voltage, which goes with the clock: the clock
#: with the cube root. That it draws 91 W when it waits is what the steps on one H100 lead to that nothing
#: throttles, by the share of the time in which it is busy (``results/several_gpus_h100.jsonl``). What the
#: memory draws is left out.
TITAN_GPU = priced("h100-sxm-96gb")
TITAN_CLOCK_HZ = TITAN_GPU.boost_clock_hz * ((500 - 91) / (700 - 91)) ** (1 / 3)
TITAN_GPU = replace(TITAN_GPU, boost_clock_hz=TITAN_CLOCK_HZ)
TITAN = {"Llama-3.1-8B": Shape(32, 4096, 32, 128256, 14336, 8, gated=True, eager=True)}


#: Fitted to Llama-1B: what nanotron's host takes for a layer with tensor parallelism, whatever its size
#: (72 ms for 16 layers on 2, 4 and 8 ranks); what it takes more where stages are in other machines, by ranks
#: (medians of two stages); what it takes for each rank's slice of each parameter that ZeRO-1 gathers
#: (``_all_gather_params``).
NANOTRON_LAYER_HOST_S = 4.4e-3
NANOTRON_STAGE_HOST_S = {2: 4.1e-3, 4: 8e-3, 8: 14.9e-3, 16: 39e-3, 32: 100e-3}
NANOTRON_GATHER_HOST_S = 8e-6
#: Fitted to Llama-1B with up to 16 tensor-parallel ranks: in a run that stalls every message between stages
#: takes so much longer, whatever its size.
NANOTRON_STALL_S = 0.31
#: Fitted to Llama-1B with 16 and 32 tensor-parallel ranks: a step of a ring over machines, whatever the size.
NANOTRON_EFA = replace(NETWORKS["efa"], hop_s=50e-6)
#: Fitted to the models of vTrain that are 1,024 wide: 3.5 ms for a layer with its recomputation, whatever its
#: size, 4.2 on 8 ranks; by tensor-parallel ranks. Those that are 2,048 wide set nothing.
VTRAIN_LAYER_HOST_S = {1: 2.3e-3, 2: 2.3e-3, 4: 2.3e-3, 8: 3.0e-3}


@cache
def nanotron_stages(shape: Shape, stages: int) -> list[str]:
    """The blocks of each stage by their letters: embedding, layers, norm, head, cast to fp32, loss.

    As nanotron's ``build_model`` places them: a stage is full when its blocks' parameters, without embeddings
    and norms, exceed its share. The last may have none; such a training does not start.
    """
    layer = (4 * shape.hidden + 3 * shape.ffn) * shape.hidden
    costs = {"l": layer, "h": shape.vocab * shape.hidden}
    blocks = "e" + "l" * shape.layers + "nhcx"
    total = sum(costs.get(block, 0) for block in blocks)
    made, placed = [""], 0
    for block in blocks:
        made[-1] += block
        placed += costs.get(block, 0)
        if placed > total * len(made) / stages:
            made.append("")
    return made + [""] * (stages - len(made))


@cache
def nanotron_bounds(shape: Shape) -> Callable[[int], tuple[int, ...]]:
    """Where the layers of each stage begin."""

    def bounds(stages: int) -> tuple[int, ...]:
        counts = [stage.count("l") for stage in nanotron_stages(shape, stages)]
        return (0, *itertools.accumulate(counts))

    return bounds


def number(row: Row, name: str, default: int = 1) -> int:
    return int(float(row[name])) if row[name] else default


def nanotron(row: Row) -> tuple[Planner, TrainingSplit] | None:
    """Data, tensor (with the sequence) and pipeline parallelism, ZeRO-1, no recomputation."""
    if row["framework"] != "nanotron" or number(row, "pp") > NANOTRON[row["model"]].layers:
        return None  # more stages than layers: nothing is known of what the others do
    split = TrainingSplit(
        tensor=number(row, "tp"),
        pipeline=number(row, "pp"),
        data=number(row, "dp"),
        micro_batches=number(row, "ga"),
        zero=number(row, "zero", 0) if number(row, "dp") > 1 else 0,
        samples=number(row, "mbs"),
    )
    host_s = NANOTRON_LAYER_HOST_S if split.tensor > 1 else 0.0
    if split.tensor > 1 and split.pipeline > 1 and split.gpus > 8:
        host_s += NANOTRON_STAGE_HOST_S[split.tensor]
    # DDP's buckets of 25 MiB in bf16 are summed up in fp32. With ZeRO there is no DDP: all gradients are
    # summed up in one message behind the last backward pass, on every rank.
    framework = Framework(
        layer_host_s=host_s,
        bucket_bytes=float("inf") if split.zero else 50 * 2**20,
        overlap=not split.zero,
        scatters=False,
        gather_host_s=NANOTRON_GATHER_HOST_S,
        bucket_copies=0,
        tensor_host_s=0.0,
        gathers_again=True,
        gradients_stay=True,
        receives_apart=False,
        bounds=nanotron_bounds(NANOTRON[row["model"]]),
    )
    return planner(
        NANOTRON[row["model"]],
        number(row, "seq"),
        "h100-sxm",
        NANOTRON_EFA,
        256,
        framework,
        4 if split.data > 1 else 2,
    ), split


def vtrain(row: Row) -> tuple[Planner, TrainingSplit] | None:
    """Megatron-DeepSpeed on a machine of A100: everything is computed again."""
    if not row["framework"].startswith("vTrain"):
        return None
    # Its kernels add biases, activations, dropout and the residual in one; attention is written out.
    shape = Shape(number(row, "layers"), number(row, "hidden"), number(row, "heads"), 51200, tied=True)
    shape = replace(shape, written=True, dropout=0.1)
    data, batch, samples = number(row, "dp"), number(row, "gbs"), number(row, "mbs")
    split = TrainingSplit(
        tensor=number(row, "tp"),
        pipeline=number(row, "pp"),
        data=data,
        micro_batches=max(1, batch // (data * samples)),
        samples=samples,
        checkpoint="full",
    )
    host_s = VTRAIN_LAYER_HOST_S[split.tensor]
    framework = Framework(
        sequence=False,
        layer_host_s=host_s,
        bucket_copies=0,
        tensor_host_s=0.0,
        gradients_stay=True,
        receives_apart=False,
    )
    return planner(shape, number(row, "seq"), "a100-sxm-80gb", "infiniband", batch, framework), split


def foundry(row: Row) -> tuple[Planner, TrainingSplit] | None:
    """llm-foundry: FSDP on A100 40 and 80 GB."""
    if not row["framework"].startswith("llm-foundry"):
        return None
    layers, hidden, heads = MPT[row["model"]]
    # Its Triton attention of 2023 with a bias takes as long as without the mask; seen on MPT-125m.
    shape = Shape(layers, hidden, heads, 50368, tied=True, causal=False)
    gpus, batch, samples = number(row, "gpus"), number(row, "gbs"), number(row, "mbs")
    split = TrainingSplit(
        data=gpus,
        zero=3 if gpus > 1 else 0,
        micro_batches=number(row, "ga"),
        samples=samples,
        checkpoint="full" if row["act_ckpt"] == "True" else "none",
    )
    gpu = "a100-sxm-40gb" if "40gb" in row["gpu"] else "a100-sxm-80gb"
    # PURE keeps and sums up bf16 throughout, DEFAULT keeps fp32.
    return planner(shape, number(row, "seq"), gpu, "infiniband-hdr", batch), split


def torchtitan(row: Row) -> tuple[Planner, TrainingSplit] | None:
    """torchtitan in bf16, eager: FSDP, context parallelism."""
    if row["framework"] != "torchtitan" or row["precision"] != "bf16" or row["compile"] == "1":
        return None
    if row["model"] not in TITAN or not row["step_s"]:
        return None
    split = TrainingSplit(
        tensor=number(row, "tp"),
        data=number(row, "fsdp"),
        context=number(row, "cp"),
        micro_batches=1,
        zero=3,
        samples=number(row, "mbs"),
        checkpoint="selective" if "selective" in row["act_ckpt"] else "full" if row["act_ckpt"] else "none",
    )
    batch = split.data * split.samples
    gpu = "h200" if "H200" in row["gpu"] else TITAN_GPU
    # Selective "per op" computes every second product of a layer again (torchtitan's ``_custom_policy``).
    framework = Framework(again=2)
    return planner(TITAN[row["model"]], number(row, "seq"), gpu, "infiniband", batch, framework), split


def flash(op: Attention, gpu: Gpu) -> tuple[str, str]:
    """The attention of PyTorch in December 2024: FlashAttention 2, on Hopper too (``sdp_utils.cpp``)."""
    return attention.FLASH, ""


SOURCES: dict[str, Callable[[Row], tuple[Planner, TrainingSplit] | None]] = {
    "nanotron": nanotron,
    "vTrain": vtrain,
    "llm-foundry": foundry,
    "torchtitan": torchtitan,
}


@dataclass(frozen=True)
class Compared:
    """A row with its prediction.

    ``stated_bytes`` is what the rank holds whose memory the row states, ``needed_bytes`` the fullest rank,
    ``fits`` whether that is there, ``starts`` whether its framework can run the split.
    """

    source: str
    row: Row
    found: Priced
    stated_bytes: float
    needed_bytes: float
    fits: bool
    starts: bool = True

    @property
    def runs(self) -> bool:
        return self.fits and self.starts

    @property
    def measured_s(self) -> float:
        if self.source == "nanotron" and self.row["tok_s_gpu"]:
            # A few rows have another batch than the table says.
            split = self.found.split
            return split.batch * number(self.row, "seq") / (float(self.row["tok_s_gpu"]) * split.gpus)
        return float(self.row["step_s"]) if self.row["step_s"] else 0.0

    @property
    def ratio(self) -> float:
        return self.found.time.time_s / self.measured_s

    @property
    def stall_s(self) -> float:
        """What messages that stall make the step longer by: a stage receives and sends in both passes, the
        first and the last do one of it."""
        split = self.found.split
        return NANOTRON_STALL_S * split.parts * {1: 0, 2: 2}.get(split.pipeline, 4)

    @property
    def ratio_stalled(self) -> float:
        """Of a prediction with stalls."""
        return (self.found.time.time_s + self.stall_s) / self.measured_s

    @property
    def stalls(self) -> bool:
        """Whether the row is nearer to the prediction with stalls."""
        return self.stall_s > 0 and abs(math.log(self.ratio_stalled)) < abs(math.log(self.ratio))


def of_messages_bytes(training: Training, stage: int) -> float:
    """What nanotron's messages within layers hold beside what is captured.

    Two buffers that gather into one place each stay (``MemoryBuffer``). The two sums of a layer, in either
    pass, are results of the whole width that NCCL's stream reads: PyTorch gives their memory back when the
    GPU is done with them (``record_stream``), while the host has launched the passes of further layers.
    """
    split, layer, layers = training.split, training.blocks.layers[0], training.parts[stage]
    if split.tensor == 1:
        return 0.0
    width = layer.input_bytes * split.tensor
    forward_s, backward_s = layer.gpu_s
    host_s = training.framework.layer_host_s / 3
    most = 0.0
    for launched in range(2 * layers + 1):
        forward, backward = min(launched, layers), max(0, launched - layers)
        now_s = (forward + 2 * backward) * host_s
        waiting = max(0.0, forward - now_s / forward_s)
        waiting += min(backward, max(0.0, backward - (now_s - layers * forward_s) / backward_s))
        most = max(most, 2 * width * waiting - backward * layer.saved_bytes)
    return 2 * width + most


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Every row that can be predicted."""
    made = []
    for row in rows:
        for source, read in SOURCES.items():
            if (found := read(row)) is None:
                continue
            plan, split = found
            backend = flash if source == "torchtitan" else attention.backend
            with patch.object(attention, "backend", backend):
                training, theirs = plan.training(split), source == "nanotron"
                held = [
                    training.stage_memory(stage).total + theirs * of_messages_bytes(training, stage)
                    for stage in range(split.pipeline)
                ]
                starts = not theirs or all(nanotron_stages(NANOTRON[row["model"]], split.pipeline))
                fits = max(held) <= plan.usable_bytes
                # nanotron states what its first rank reserves.
                made.append(Compared(source, row, plan.priced(split), held[0], max(held), fits, starts))
    return made


# ---- what is reported -----------------------------------------------------------------------------


def errors(chosen: Iterable[Compared], *, stalled: bool = False) -> dict[str, float]:
    """Errors of the step's time; ``stalled``: of rows that stall those of the prediction with stalls."""
    ratios = [
        each.ratio_stalled if stalled and each.stalls else each.ratio for each in chosen if each.measured_s
    ]
    if not ratios:
        return {"rows": 0}
    off = sorted(abs(ratio - 1) for ratio in ratios)
    return {
        "rows": len(off),
        "median": round(statistics.median(off), 3),
        "p90": round(off[int(0.9 * len(off))], 3),
        "median ratio": round(statistics.median(ratios), 3),
    }


def ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    made = [0.0] * len(values)
    for place, index in enumerate(order):
        made[index] = place
    return made


def spearman(chosen: list[Compared]) -> float:
    """Correlation of ranks of predicted and measured times, it being known which rows stall."""
    predicted_s = [each.found.time.time_s + each.stall_s * each.stalls for each in chosen]
    return statistics.correlation(ranks(predicted_s), ranks([each.measured_s for each in chosen]))


def grouped(steady: Iterable[Compared], ran: Iterable[Compared]) -> dict[str, Any]:
    """Within a model and a number of GPUs: correlation, of all with pipelines' stalls too, and how good the
    predicted best is."""
    groups: dict[tuple[str, int], tuple[list[Compared], list[Compared]]] = defaultdict(lambda: ([], []))
    for place, chosen in enumerate((steady, ran)):
        for each in chosen:
            groups[each.row["model"], each.found.split.gpus][place].append(each)
    made = {}
    for (name, gpus), (own, every) in sorted(groups.items()):
        # A plan proposes what fits.
        best = min(own, key=lambda each: (not each.fits, each.found.time.time_s))
        least_s = min(each.measured_s for each in own)
        made[f"{name}, {gpus} GPUs"] = {
            **errors(own),
            "spearman": round(spearman(own), 3),
            "predicted best over measured best": round(best.measured_s / least_s, 3),
            "all rows": len(every),
            "spearman, all rows, pipelines with their stalls": round(spearman(every), 3),
        }
    return made


def needs_no_less(each: Compared, other: Compared) -> bool:
    """Whether a run holds at least what another one of nanotron's holds, whatever a memory model says."""
    mine, its = each.found.split, other.found.split
    as_large = each.row["model"] == other.row["model"] or each.row["model"] == "Llama-8B"
    layers = mine.pipeline == its.pipeline and mine.tensor <= its.tensor
    activations = mine.samples >= its.samples and min(mine.parts, its.pipeline) >= min(
        its.parts, its.pipeline
    )
    gradients = min(mine.parts, 2) >= min(its.parts, 2) and min(mine.data, 2) >= min(its.data, 2)
    optimizer = mine.zero < its.zero or (mine.zero == its.zero and (not mine.zero or mine.data <= its.data))
    return as_large and layers and activations and gradients and optimizer


def memory(chosen: Iterable[Compared], every: Iterable[Compared]) -> dict[str, Any]:
    """Whether what ran out of memory is told from what ran, and errors of the memory where it is stated.

    A failure is not of memory where one of ``every`` run that ran held at least as much.
    """
    failed = [each for each in chosen if each.row["status"] not in ("", "ok")]
    ran = [each for each in every if each.row["status"] == "ok"]
    else_failed = {id(each) for each in failed if any(needs_no_less(other, each) for other in ran)}
    told = [(each.runs, each.row["status"] == "ok") for each in chosen if each.row["status"]]
    splits: dict[tuple[str, TrainingSplit], list[Compared]] = defaultdict(list)
    for each in chosen:
        if each.row["status"]:
            splits[each.row["model"], each.found.split].append(each)
    once = [own[0].runs == any(each.row["status"] == "ok" for each in own) for own in splits.values()]
    of_memory = [
        each.runs == (each.row["status"] == "ok")
        for each in chosen
        if each.row["status"] and id(each) not in else_failed
    ]
    ratios = [
        (each.stated_bytes - CONTEXT_BYTES) / 2**30 / float(each.row["mem_gb"])
        for each in chosen
        if each.row["mem_gb"] and each.row["status"] == "ok"
    ]
    made: dict[str, Any] = {}
    if told:
        made = {
            "rows": len(told),
            "right": round(sum(fits == ran for fits, ran in told) / len(told), 3),
            "right, by memory alone": round(
                sum(each.fits == (each.row["status"] == "ok") for each in chosen if each.row["status"])
                / len(told),
                3,
            ),
            "right, each split once, which ran if one run of it did": round(sum(once) / len(once), 3),
            "splits of which one run ran and another did not": len(
                [own for own in splits.values() if len({each.row["status"] for each in own}) > 1]
            ),
            "failures that are not of memory, by measurements alone": len(else_failed),
            "right, without these": round(sum(of_memory) / len(of_memory), 3),
            "ran, said not to fit": sum(ran and not fits for fits, ran in told),
            "did not run, said to fit": sum(fits and not ran for fits, ran in told),
            "of them, said to need less than half of the memory": sum(
                each.row["status"] != "ok" and each.starts and each.needed_bytes < 40 * 2**30
                for each in chosen
                if each.row["status"]
            ),
        }
    if ratios:
        off = [abs(ratio - 1) for ratio in ratios]
        made["memory, median error"] = round(statistics.median(off), 3)
        made["memory, median ratio"] = round(statistics.median(ratios), 3)
    return made


def seen_to_stall(chosen: list[Compared]) -> set[int]:
    """Rows that stall by measurements alone: indices.

    A pipeline: another run with as many tensor-parallel ranks and stages, and with micro-batches at least as
    large, took less for each by more than half of what stalls take. Without stages: the same split took a
    fifth less on fewer GPUs, which did more.
    """

    def alike(each: Compared) -> tuple[Any, ...]:
        return each.row["model"], each.found.split.tensor, each.found.split.pipeline

    others: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    for each in chosen:
        others[alike(each)].append(each)
    made = set()
    for index, each in enumerate(chosen):
        split = each.found.split
        larger = [other for other in others[alike(each)] if other.found.split.samples >= split.samples]
        if each.stall_s:
            least_s = min(other.measured_s / other.found.split.parts for other in larger)
            own_s = each.measured_s / (split.parts + split.pipeline - 1)
            found = own_s - least_s > each.stall_s / split.parts / 2
        else:
            found = any(
                other.found.split.gpus < split.gpus and 1.2 * other.measured_s < each.measured_s
                for other in larger
                if other.found.split.samples == split.samples
            )
        made |= {index} if found else set()
    return made


def nanotron_report(ran: list[Compared]) -> dict[str, Any]:
    """Rows that stall and those that do not; groups of a model and a number of GPUs."""
    seen = seen_to_stall(ran)
    piped = {index for index, each in enumerate(ran) if each.found.split.pipeline > 1}
    stall = {index for index, each in enumerate(ran) if each.stalls}
    steady = [each for index, each in enumerate(ran) if index not in stall | (seen - piped)]
    by_machines: dict[int, list[bool]] = defaultdict(list)
    for index in piped:
        by_machines[max(1, ran[index].found.split.gpus // 8)].append(index in stall)
    report: dict[str, Any] = {
        "nanotron, which stall": {
            "pipelines": len(stall),
            "of them by measurements alone": len(seen & stall),
            "by measurements alone, nearer to a prediction without stalls": len((seen & piped) - stall),
            "without stages, by measurements alone": len(seen - piped),
            "share of pipelines by machines": {
                str(machines): round(statistics.mean(each), 3)
                for machines, each in sorted(by_machines.items())
            },
        },
        "nanotron, not seen to stall by measurements alone": errors(
            each for index, each in enumerate(ran) if index not in seen
        ),
        "nanotron, do not stall": errors(steady),
        "nanotron, all, pipelines with their stalls": errors(ran, stalled=True),
    }
    for name in NANOTRON:
        report[f"nanotron, {name}, do not stall"] = errors(
            each for each in steady if each.row["model"] == name
        )
        report[f"nanotron, {name}, pipelines that stall, with their stalls"] = errors(
            (ran[index] for index in stall if ran[index].row["model"] == name), stalled=True
        )
    groups = grouped(steady, ran)
    good = [each["predicted best over measured best"] <= 1.05 for each in groups.values()]
    report["nanotron, groups"] = groups
    report["nanotron, predicted best within 5 %"] = round(sum(good) / len(good), 3)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--source", choices=SOURCES, help="only this source")
    parser.add_argument("--rows", type=Path, help="write every row with its prediction there, as CSV")
    parser.add_argument("--record", action="store_true", help="write the errors into results/")
    options = parser.parse_args()
    opened = gzip.open if options.steps.suffix == ".gz" else open
    with opened(options.steps, "rt") as file:
        rows = list(csv.DictReader(file))
    if options.source:
        rows = [row for row in rows if SOURCES[options.source](row) is not None]
    every = compared(rows)
    report: dict[str, Any] = {}
    for source in SOURCES:
        own = [each for each in every if each.source == source]
        ran = [each for each in own if each.measured_s]
        if not own:
            continue
        report[source] = errors(ran)
        for width in sorted({each.row["hidden"] for each in own}) if source == "vTrain" else ():
            report[f"{source}, {width} wide"] = errors(each for each in own if each.row["hidden"] == width)
        for name in sorted({each.row["model"] for each in own}):
            part = [each for each in own if each.row["model"] == name]
            report[f"{source}, {name}"] = {**errors(part), **memory(part, own)}
    ran = [each for each in every if each.source == "nanotron" and each.measured_s]
    report |= nanotron_report(ran) if ran else {}
    print(json.dumps(report, indent=1))
    if options.record:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    if options.rows:
        with options.rows.open("w", newline="") as file:
            names = [
                "source",
                "model",
                "gpus",
                "dp",
                "tp",
                "pp",
                "zero",
                "mbs",
                "ga",
                "gbs",
                "seq",
                "act_ckpt",
            ]
            parts = ["time_s", "compute_s", "recompute_s", "tensor_s", "data_s", "bubble_s", "optimizer_s"]
            writer = csv.writer(file)
            writer.writerow([*names, "status", "measured_s", *parts, "mem_gb", "predicted_gib"])
            for each in every:
                times = [f"{getattr(each.found.time, part):.5f}" for part in parts]
                stated = [each.source, *(each.row[name] for name in names[1:]), each.row["status"]]
                size = f"{each.needed_bytes / 2**30:.2f}"
                writer.writerow([*stated, each.measured_s, *times, each.row["mem_gb"], size])


if __name__ == "__main__":
    main()
