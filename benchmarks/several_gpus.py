"""Collectives and training steps on the GPUs of a machine, beside what tilefit predicts for them.

    PYTHONPATH=src python benchmarks/several_gpus.py --rows several_gpus.jsonl --seconds 480
    PYTHONPATH=src python benchmarks/several_gpus.py --rows several_gpus.jsonl --compare
    PYTHONPATH=src python benchmarks/several_gpus.py --predict held

The first runs on two GPUs of one machine and writes a row as soon as it is measured: medians of ten steps
back to back and of four after each of which the host waits, and the allocator's peaks; with ``--profile``
also what a profiled step consists of. Processes that do not answer are ended, and the rows after theirs go on
with others. ``--device cpu`` tries it with gloo at tiny sizes. The others need no GPU. ``--predict`` writes
what is predicted for the ``new`` and ``held`` kinds of steps, which was done before they were measured.

Each step has the scale of its host (:mod:`tilefit.measure.launch`), measured before and after it and on both
ranks at once: a host changes by the minute, and its ranks differ.
"""

from __future__ import annotations

import argparse
import copy
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
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
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
from tilefit.measure.launch import launch_scale
from tilefit.measure.ranks import Ranks
from tilefit.options import StepOptions
from tilefit.parallel.blocks import Framework, Model
from tilefit.parallel.choices import Precision, TrainingSplit
from tilefit.parallel.planning import Job, Planner, Priced, precision_of
from tilefit.parallel.schedule import GPIPE, ONE_F_ONE_B, ZERO_BUBBLE, ZERO_BUBBLE_V
from tilefit.parallel.training import CONTEXT_BYTES

RESULTS = Path(__file__).parent / "results" / "several_gpus.json"
PREDICTED = RESULTS.with_name("several_gpus_predicted.json")
#: Hosts that predictions are written for, by how long they take to launch; between them lines are drawn.
SCALES = (0.5, 0.65, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5)
#: Of the thread that goes forward and of the one that goes backward, on Hopper: two blocks of 32 MiB, as a
#: snapshot of the allocator shows them.
WORKSPACES_BYTES = 2 * 32 * 2**20
#: A host that takes nearly no time, so that the GPU's is left.
NO_HOST = 1e-3
WARM, TIMED, SYNCED, PROFILED = 3, 10, 4, 2
#: Heads, key and value heads, width, of the feed-forward part, vocabulary, layers.
LLAMA = {
    "llama-1b": (32, 8, 2048, 8192, 128256, 16),
    "llama-3b": (24, 8, 3072, 8192, 128256, 28),
    "llama-8b": (32, 8, 4096, 14336, 128256, 32),
    "llama-13b": (40, 40, 5120, 13824, 32000, 40),
    "llama-70b": (64, 8, 8192, 28672, 128256, 80),
    "llama-405b": (128, 8, 16384, 53248, 128256, 126),
    "gemma-2b": (8, 1, 2048, 16384, 256000, 18),
    "qwen-14b": (40, 8, 5120, 13824, 152064, 48),
    "yi-34b": (56, 8, 7168, 20480, 64000, 60),
    "qwen-32b": (40, 8, 5120, 27648, 152064, 64),
    "phi-3": (32, 32, 3072, 8192, 32064, 32),
}
#: By the names of :mod:`torch.distributed.pipelining`, and of plans.
SCHEDULES = {
    "1F1B": ("Schedule1F1B", ONE_F_ONE_B),
    "GPipe": ("ScheduleGPipe", GPIPE),
    "Interleaved": ("ScheduleInterleaved1F1B", ONE_F_ONE_B),
    "ZeroBubble": ("ScheduleInterleavedZeroBubble", ZERO_BUBBLE),
    "ZBV": ("ScheduleZBVZeroBubble", ZERO_BUBBLE_V),
}


@dataclass(frozen=True)
class Library:
    """A model of transformers: its class, its configuration, the list of its layers and of how many."""

    kind: str
    sizes: dict[str, int]
    layers: str
    count: str
    tiny: dict[str, int]


LIBRARY = {
    "gpt2": Library(
        "GPT2LMHeadModel", {"n_layer": 12}, "transformer.h", "n_layer", {"n_embd": 64, "n_head": 2}
    ),
    "gpt2-xl": Library(
        "GPT2LMHeadModel",
        {"n_layer": 48, "n_embd": 1600, "n_head": 25, "use_cache": False},
        "transformer.h",
        "n_layer",
        {"n_embd": 64, "n_head": 2},
    ),
    "bert-large": Library(
        "BertForMaskedLM",
        {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        "bert.encoder.layer",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128},
    ),
    "vit": Library(
        "ViTForImageClassification",
        {"num_hidden_layers": 12},
        "vit.encoder.layer",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 32},
    ),
    "t5": Library(
        "T5ForConditionalGeneration",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}
        | {"use_cache": False},
        "decoder.block",
        "",
        {"num_layers": 2, "d_model": 64},
    ),
    "vit-large": Library(
        "ViTForImageClassification",
        {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        "vit.encoder.layer",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 32},
    ),
    "qwen3-0.6b": Library(
        "Qwen3ForCausalLM",
        {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "tie_word_embeddings": True, "use_cache": False},
        "model.layers",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
        | {"head_dim": 32, "vocab_size": 512},
    ),
    "opt-1.3b": Library(
        "OPTForCausalLM",
        {"num_hidden_layers": 24, "hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32}
        | {"word_embed_proj_dim": 2048, "use_cache": False},
        "model.decoder.layers",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "ffn_dim": 128, "word_embed_proj_dim": 64},
    ),
    "pythia-1b": Library(
        "GPTNeoXForCausalLM",
        {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8}
        | {"vocab_size": 50304, "use_cache": False},
        "gpt_neox.layers",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 512},
    ),
    "roberta-large": Library(
        "RobertaForMaskedLM",
        {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
        | {"vocab_size": 50265, "max_position_embeddings": 514},
        "roberta.encoder.layer",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 512},
    ),
    "smollm-360m": Library(
        "LlamaForCausalLM",
        {"num_hidden_layers": 32, "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15}
        | {"num_key_value_heads": 5, "vocab_size": 49152, "tie_word_embeddings": True, "use_cache": False},
        "model.layers",
        "num_hidden_layers",
        {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
        | {"vocab_size": 512},
    ),
}
TORCHVISION = ("resnet50", "convnext_base", "swin_t", "swin_s", "convnext_small")
IMAGES = (*TORCHVISION, "vit", "vit-large")


@dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
        model: One of :data:`TORCHVISION`, of :data:`LIBRARY` or of :data:`LLAMA`.
        way: ``one`` GPU, ``each`` rank beside the other without a word, ``ddp``, ``zero1`` (DDP with
            ``ZeroRedundancyOptimizer``), ``scatter`` (ZeRO-1 as Megatron-LM's), ``fsdp``, ``tp``, ``pp``.
        samples: Of a micro-batch on each GPU; of a pipeline, on all.
        seq: Tokens of a sample.
        parts: Micro-batches.
        layers: So many layers alone, with bf16 weights; 0: the whole model.
        reshard: FSDP frees parameters after the forward pass.
        checkpoint: Layers are computed again in the backward pass.
        selective: Of them all but products and attention.
        sequence: Tensor-parallel ranks share the sequence, too.
        schedule: Of the pipeline: one of :data:`SCHEDULES`.
        each: Gradients are summed up behind every micro-batch; None: as ``tilefit plan`` assumes.
        views: Gradients are views of DDP's buckets.
        again: Measured for the so-manieth time, in other processes.
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
    selective: bool = False
    each: bool | None = None
    views: bool = False
    again: int = 0

    @property
    def gpus(self) -> int:
        return 1 if self.way == "one" else 2

    @property
    def chunks(self) -> int:
        return 1 if self.schedule in ("1F1B", "GPipe") else 2

    @property
    def name(self) -> str:
        told = [self.model, self.way, f"{self.samples}" + (f"x{self.seq}" if self.seq else "")]
        told += [f"{self.parts} parts"] if self.parts > 1 else []
        told += [f"{self.layers} layers"] if self.layers else []
        told += ["keep"] if not self.reshard else []
        told += ["selective" if self.selective else "checkpoint"] if self.checkpoint else []
        told += ["sequence"] if self.sequence else []
        told += [self.schedule] if self.way == "pp" else []
        told += ["sums each" if self.each else "sums once"] if self.each is not None else []
        told += ["views"] if self.views else []
        told += [f"again {self.again}"] if self.again else []
        return " ".join(told)


G, R, L, B = "gpt2", "resnet50", "llama-1b", "llama-8b"
BERT, V, T, X = "bert-large", "vit", "t5", "gpt2-xl"
L3, L13, L70 = "llama-3b", "llama-13b", "llama-70b"
Q, OPT, P, G2, Q14, Y = "qwen3-0.6b", "opt-1.3b", "pythia-1b", "gemma-2b", "qwen-14b", "yi-34b"
Q32, PHI, RO, SM = "qwen-32b", "phi-3", "roberta-large", "smollm-360m"
#: By kind; the processes are fresh for each. Those of ``new`` and ``held`` kinds set nothing of the model
#: before they were predicted (``results/several_gpus_predicted.json``); those measured ``again`` tell what a
#: host repeats.
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
    "new ddp": [
        Case(BERT, "ddp", 16, 512),
        Case(V, "ddp", 64),
        Case(X, "ddp", 4, 1024),
        Case(T, "ddp", 16, 512),
        Case(BERT, "ddp", 4, 128),
        Case(V, "ddp", 8),
        Case(X, "ddp", 4, 1024, views=True),
        Case(G, "ddp", 8, 1024, parts=4, each=True),
        Case(G, "zero1", 16, 1024),
        Case(L, "zero1", 2, 2048),
        Case(R, "ddp", 128),
        Case(BERT, "one", 16, 512),
        Case(V, "one", 64),
        Case(T, "one", 16, 512),
        Case(BERT, "one", 4, 128),
        Case(V, "one", 8),
    ],
    "new fsdp": [
        Case(L3, "fsdp", 2, 2048),
        Case(X, "fsdp", 4, 1024),
        Case(L3, "fsdp", 2, 2048, reshard=False),
        Case(L3, "fsdp", 4, 4096, checkpoint=True),
        Case(L, "fsdp", 8, 2048, checkpoint=True, selective=True),
        Case(L3, "fsdp", 1, 2048, parts=4),
        Case(L3, "fsdp", 1, 2048, parts=4, each=False),
        Case(BERT, "fsdp", 16, 512),
        Case(X, "fsdp", 4, 1024, reshard=False),
        Case(X, "fsdp", 8, 1024, checkpoint=True),
        Case(L3, "fsdp", 1, 512),
        Case(L3, "one", 2, 2048),
        Case(X, "one", 4, 1024),
    ],
    "new tp": [
        Case(L70, "tp", 1, 4096, layers=2),
        Case(L13, "tp", 4, 2048, layers=4),
        Case(L70, "tp", 1, 4096, layers=2, sequence=True),
        Case(L3, "tp", 8, 2048, layers=8, sequence=True),
        Case(L13, "tp", 1, 1024, layers=4),
        Case(L13, "tp", 2, 2048, layers=4, checkpoint=True),
        Case(L70, "one", 1, 4096, layers=2),
        Case(L13, "one", 4, 2048, layers=4),
    ],
    "new pp": [
        Case(B, "pp", 1, 2048, parts=8, layers=8, schedule="Interleaved"),
        Case(L13, "pp", 1, 2048, parts=4, layers=12),
        Case(L3, "pp", 2, 2048, parts=6, layers=16, schedule="GPipe"),
        Case(L70, "pp", 1, 2048, parts=8, layers=4),
        Case(L13, "pp", 1, 2048, parts=4, layers=12, checkpoint=True),
        Case(L3, "pp", 1, 512, parts=8, layers=16),
    ],
    "held ddp": [
        Case(Q, "ddp", 4, 2048),
        Case(OPT, "ddp", 4, 1024, checkpoint=True),
        Case(P, "zero1", 4, 2048),
        Case("convnext_base", "ddp", 64),
        Case("vit-large", "ddp", 32),
        Case("swin_t", "ddp", 32),
        Case(OPT, "ddp", 2, 512, parts=3),
    ],
    "held fsdp": [
        Case(Q, "fsdp", 2, 4096, reshard=False),
        Case(OPT, "fsdp", 8, 1024),
        Case(P, "fsdp", 8, 2048, checkpoint=True),
        Case(G2, "fsdp", 2, 2048),
        Case(G2, "fsdp", 1, 4096, parts=2, reshard=False),
    ],
    "held tp": [
        Case(Y, "tp", 1, 4096, layers=2, sequence=True),
        Case("llama-405b", "tp", 1, 4096, layers=1),
        Case(Q14, "tp", 2, 4096, layers=4, sequence=True, checkpoint=True),
    ],
    "held pp": [
        Case(Q14, "pp", 1, 4096, parts=8, layers=8, schedule="ZeroBubble"),
        Case(G2, "pp", 2, 2048, parts=6, layers=12, schedule="ZBV"),
        Case(Y, "pp", 1, 2048, parts=4, layers=4, checkpoint=True),
        Case(Q14, "pp", 2, 2048, parts=4, layers=8, schedule="Interleaved"),
    ],
    "third ddp": [
        Case("swin_s", "ddp", 32),
        Case("convnext_small", "ddp", 32),
        Case(RO, "ddp", 16, 512, checkpoint=True),
        Case(SM, "ddp", 2, 1024, parts=2),
    ],
    "third fsdp": [
        Case(SM, "fsdp", 1, 512),
        Case(SM, "fsdp", 8, 2048, checkpoint=True),
        Case(RO, "fsdp", 8, 512),
        Case(PHI, "fsdp", 2, 4096, checkpoint=True),
        Case(OPT, "fsdp", 8, 1024, again=1),
    ],
    "third tp": [
        Case(Q32, "tp", 2, 4096, layers=2, sequence=True),
        Case(PHI, "tp", 4, 2048, layers=6, checkpoint=True),
    ],
    "third pp": [
        Case(PHI, "pp", 2, 2048, parts=4, layers=8),
        Case(Q32, "pp", 1, 4096, parts=4, layers=4, schedule="Interleaved"),
        Case(PHI, "pp", 2, 2048, parts=4, layers=8, schedule="GPipe", checkpoint=True),
    ],
    "third each": [
        Case("swin_s", "each", 32),
        Case("convnext_small", "each", 32),
        Case(RO, "each", 16, 512, checkpoint=True),
        Case(SM, "each", 2, 1024, parts=2),
        Case(RO, "each", 8, 512),
        Case(OPT, "each", 4, 1024),
    ],
    "fourth ddp": [
        Case(L, "ddp", 2, 2048, views=True),
        Case(L, "scatter", 2, 2048),
        Case(G, "ddp", 16, 1024, views=True),
        Case(G, "scatter", 16, 1024),
        Case(X, "scatter", 4, 1024),
    ],
    "fourth tp": [
        Case(L13, "tp", 8, 2048, layers=4, sequence=True),
        Case(Y, "tp", 4, 2048, layers=2),
    ],
    "fourth pp": [
        Case(L13, "pp", 2, 2048, parts=6, layers=8),
        Case(Q32, "pp", 1, 2048, parts=8, layers=4, schedule="ZBV"),
    ],
    "again": [
        Case(R, "ddp", 32, again=1),
        Case(R, "one", 32, again=1),
        Case(R, "ddp", 8, again=1),
        Case(R, "one", 8, again=1),
        Case(L, "fsdp", 1, 1024, again=1),
        Case(B, "tp", 1, 4096, layers=4, again=1),
        Case(B, "tp", 1, 4096, layers=4, sequence=True, again=1),
        Case(B, "tp", 1, 512, layers=4, again=1),
        Case(R, "ddp", 32, again=2),
        Case(R, "one", 32, again=2),
        Case(B, "tp", 1, 4096, layers=4, sequence=True, again=2),
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


class Sequences(nn.Module):
    """A model of transformers that reads tokens, and learns to say them."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        super().__init__()
        self.model, self.layers_at = library(name, sizes), LIBRARY[name].layers

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_submodule(self.layers_at)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Images(Sequences):
    """A model of transformers that reads images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return self.model(pixel_values=images, labels=labels).loss


def library(name: str, sizes: dict[str, int]) -> nn.Module:
    with tolerated():
        import transformers

        if name == "t5":
            from transformers.integrations import sdpa_attention

            sdpa_attention.create_position_bias_mask = mask_of_5_17
        kind = getattr(transformers, LIBRARY[name].kind)
        return kind(kind.config_class(**LIBRARY[name].sizes | sizes))


class Classifier(nn.Module):
    """A model of torchvision."""

    def __init__(self, name: str) -> None:
        super().__init__()
        with tolerated():
            from torchvision.models import get_model
        self.model = get_model(name).to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            self.model(images), torch.zeros(len(images), dtype=torch.long, device=images.device)
        )


def mask_of_5_17(
    bias: torch.Tensor, mask: None, is_causal: bool, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """T5's mask as transformers 5.17 makes it, which the rows were measured with: its last dimension is not
    contiguous, so that attention is not fused. Later ones make it so."""
    if not is_causal:
        return bias
    places = [torch.arange(each.shape[2], device=key.device) for each in (query, key)]
    return torch.where(places[0][:, None] >= places[1], bias, float("-inf"))


def build(case: Case, tiny: bool, layers: int = 0) -> nn.Module:
    """The model of a case, or ``layers`` of it, on the default device."""
    if case.model in TORCHVISION:
        return Classifier(case.model)
    if case.model in LIBRARY:
        known = LIBRARY[case.model]
        layers = 2 if tiny else layers
        sizes = {known.count: layers} if layers and known.count else {}
        kind = Images if case.model in IMAGES else Sequences
        return kind(case.model, sizes | known.tiny if tiny else sizes)
    *sizes, vocab, count = LLAMA[case.model]
    if tiny:
        sizes, vocab, count = [4, 2, 64, 128], 512, 2
    if case.layers:
        made = Layers(tuple(sizes), layers or case.layers, case.seq)
        return made.to(torch.bfloat16)
    return Llama(tuple(sizes), vocab, layers or count, case.seq)


def data(case: Case, tiny: bool, samples: int = 0) -> torch.Tensor:
    """The input of a micro-batch, on the default device."""
    samples = samples or case.samples
    if case.model in IMAGES:
        side = 32 if tiny else 224
        return torch.randn(samples, 3, side, side).to(memory_format=torch.channels_last)
    if case.layers:
        hidden = 64 if tiny else LLAMA[case.model][2]
        return torch.randn(samples, case.seq, hidden).to(torch.bfloat16)
    return torch.randint(0, 512, (samples, case.seq))


# ---- a step on a rank -----------------------------------------------------------------------------


def checkpointed(model: nn.Module, case: Case) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    products = [torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default]
    products += [torch.ops.aten._scaled_dot_product_cudnn_attention.default]
    more: dict[str, Any] = {}
    if case.selective:
        more["context_fn"] = partial(create_selective_checkpoint_contexts, products)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **more)


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
    from torch.distributed.pipelining import PipelineStage, schedules

    rank = dist.get_rank()
    model.ends = False
    chunks = case.chunks
    each = len(model.layers) // (2 * chunks)
    parts = []
    places = (rank, 3 - rank) if case.schedule == "ZBV" else range(rank, 2 * chunks, 2)
    for place in places:
        part = copy.copy(model)
        part._modules = {"layers": model.layers[place * each : (place + 1) * each]}
        parts.append(PipelineStage(part, place, 2 * chunks, device))
    model.layers = nn.ModuleList(layer for part in parts for layer in part.submod.layers)
    kind = getattr(schedules, SCHEDULES[case.schedule][0])
    schedule = kind(parts if chunks > 1 else parts[0], case.parts, loss_fn=squares)
    batch = x.repeat(case.parts, 1, 1)
    given = (batch,) if 0 in places else ()
    target = {"target": batch} if 2 * chunks - 1 in places else {}
    return lambda: schedule.step(*given, **target)


class Scattered:
    """ZeRO-1 as Megatron-LM's: a full bucket's gradients are summed up on the rank that updates them, and all
    gather what was updated.

    Args:
        model: Its parameters become views of one tensor.
        bytes_each: Of a bucket.
    """

    def __init__(self, model: nn.Module, bytes_each: int = 25 * 2**20) -> None:
        own = [*model.parameters()][::-1]  # about the order in which gradients come
        rank, ranks = dist.get_rank(), dist.get_world_size()
        groups: list[list[nn.Parameter]] = [[]]
        for p in own:
            if groups[-1] and 4 * sum(each.numel() for each in groups[-1]) >= bytes_each:
                groups.append([])
            groups[-1].append(p)
        self.missing, self.sizes = [len(each) for each in groups], [len(each) for each in groups]
        self.works: list[Any] = []
        self.weights, self.sums, shares = [], [], []
        for index, members in enumerate(groups):
            size = sum(p.numel() for p in members)
            size += -size % ranks
            weights, sums = (torch.zeros(size, device=own[0].device) for _ in range(2))
            begin = 0
            for p in members:
                end = begin + p.numel()
                weights[begin:end].copy_(p.data.flatten())
                p.data = weights[begin:end].view_as(p)
                p.register_post_accumulate_grad_hook(partial(self.copied, index, sums[begin:end].view_as(p)))
                begin = end
            share = nn.Parameter(weights.chunk(ranks)[rank])
            share.grad = sums.chunk(ranks)[rank]
            self.weights.append(weights)
            self.sums.append(sums)
            shares.append(share)
        self.optimizer = torch.optim.AdamW(shares, lr=1e-5, fused=True)
        self.shares = shares

    def copied(self, index: int, view: torch.Tensor, parameter: nn.Parameter) -> None:
        view.copy_(parameter.grad)
        parameter.grad = None
        self.missing[index] -= 1
        if not self.missing[index]:
            grad, sums = self.shares[index].grad, self.sums[index]
            self.works.append(dist.reduce_scatter_tensor(grad, sums, op=dist.ReduceOp.AVG, async_op=True))

    def step(self) -> None:
        while self.works:
            self.works.pop().wait()
        self.optimizer.step()
        for weights, share in zip(self.weights, self.shares, strict=True):
            self.works.append(dist.all_gather_into_tensor(weights, share.data, async_op=True))
        while self.works:
            self.works.pop().wait()
        self.missing = [*self.sizes]

    def zero_grad(self) -> None:
        """Each step writes the sums anew."""


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer | Scattered:
    if case.way == "scatter":
        return Scattered(model)
    if case.way == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-5, fused=True
        )
    # A kernel of the optimizer takes either distributed tensors or plain ones.
    kinds: dict[type, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        kinds[type(parameter.data)].append(parameter)
    return torch.optim.AdamW([{"params": each} for each in kinds.values()], lr=1e-5, fused=True)


def step_of(case: Case, device: torch.device, tiny: bool) -> tuple[Callable[[], None], nn.Module]:
    """A step on this rank, and its model."""
    torch.manual_seed(0)
    with device:
        model, x = build(case, tiny), data(case, tiny)
    if case.checkpoint:
        checkpointed(model, case)
    work: Callable[[], None] | None = None
    trained = model
    if case.way in ("ddp", "zero1"):
        ids = [device.index] if device.type == "cuda" else None
        trained = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=case.views
        )
    elif case.way == "fsdp":
        trained = sharded(model, case)
    elif case.way == "tp":
        if case.sequence:
            x = x.chunk(2, 1)[dist.get_rank()].contiguous()
        trained = tensor_parallel(model, case, device.type)
    elif case.way == "pp":
        work = pipeline(model, case, device, x)
    optimizer = optimizer_of(trained, case)
    autocast = case.way != "fsdp" and not case.layers

    def passes() -> None:
        for part in range(case.parts):
            last = part == case.parts - 1
            if case.way == "ddp":
                trained.require_backward_grad_sync = last or bool(case.each)  # what ``no_sync`` sets
            elif case.way == "fsdp" and case.each is not None:
                trained.set_requires_gradient_sync(last or case.each)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = trained(x)
            loss.backward()

    def step() -> None:
        (work or passes)()
        optimizer.step()
        optimizer.zero_grad()

    return step, trained


def run(case: Case, kind: str, tiny: bool, looks: bool) -> dict[str, Any]:
    """Measure a case on this rank; ``looks``: profile it, too, after which a host may launch more slowly."""
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
    meet()
    before = launch_scale(device) if cuda else 1.0
    step, model = step_of(case, device, tiny)
    gc.collect()  # layers of other stages: a layer whose forward pass is wrapped refers to itself
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
    found["launch_scales"] = before, launch_scale(device) if cuda else 1.0
    if looks:
        found["clocks"] = clocks(step, max(found["synced_s"], found["mean_s"]), case) if cuda else []
        meet()
        found["profile"] = profiled(step, cuda)
    return found


def scale_of(row: dict[str, Any], of_host: float) -> float:
    """How long the slower of the ranks takes to launch beside the step, before and after it in the mean; of
    the first rows that was measured of one rank alone, when the processes began."""
    ranks = [each["launch_scales"] for each in (row, *row["others"]) if "launch_scales" in each]
    return max(map(statistics.mean, ranks)) if ranks else of_host


def clocks(step: Callable[[], None], step_s: float, case: Case) -> list[str]:
    """What rank 0's GPU runs at and draws while steps follow each other for a second; of long steps alone."""
    count = torch.tensor([int(1.2 / step_s)], device="cuda")
    if case.gpus > 1:
        dist.all_reduce(count, dist.ReduceOp.MIN)
    if int(count) > 30:
        return []
    query = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
    asked = ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-lms", "100"]
    reader = None if dist.get_rank() else subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
    for _ in range(int(count) + 1):
        step()
    torch.cuda.synchronize()
    if reader is None:
        return []
    reader.terminate()
    return reader.communicate(timeout=10)[0].splitlines()


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
    count = case.layers
    if not count and case.model in LLAMA:
        count = LLAMA[case.model][-1]
    elif case.model in LIBRARY:
        count = LIBRARY[case.model].sizes.get(LIBRARY[case.model].count, 0)
    amp = "off" if short else "bf16"
    options = StepOptions(amp=amp, fused_optimizer=True)
    name = "images" if case.model in IMAGES else "x" if case.layers else "tokens"
    model = model.to(torch.bfloat16) if short else model
    return Model(capture(model, {name: x}, options=options, loss=lambda loss: loss), count)


@cache
def model_of(case: Case) -> Model:
    """The model of a case, whatever the split."""
    return captured(case, short=bool(case.layers) or case.way == "fsdp")


@cache
def planner(case: Case, gpu: str, scale: float) -> Planner:
    """Prices a case of two GPUs of a machine whose host launches in ``scale`` of the time assumed."""
    plain = Case(case.model, "fsdp" if case.way == "fsdp" else "one", 2, case.seq, layers=case.layers)
    model = model_of(plain)
    precision = Precision(2, 2, 2, 4) if case.layers else precision_of(model.step)
    known = priced(gpu)
    known = replace(known, calibration=replace(known.calibration, launch_scale=scale))
    framework = Framework(
        sequence=case.sequence,
        scatters=case.way != "zero1",
        bucket_copies=1 if case.views or case.way == "scatter" else 2,
    )
    return Planner(model, Fabric(known, 2), Job(case.samples, precision, framework))


def split_of(case: Case) -> TrainingSplit:
    """How its GPUs share a case."""
    zero = {"fsdp": 3, "zero1": 1, "scatter": 1}.get(case.way, 0)
    checkpoint = "selective" if case.selective else "full" if case.checkpoint else "none"
    return TrainingSplit(
        tensor=2 if case.way == "tp" else 1,
        pipeline=2 if case.way == "pp" else 1,
        data=2 if case.way in ("ddp", "zero1", "scatter", "fsdp") else 1,
        micro_batches=case.parts,
        zero=zero,
        samples=case.samples,
        chunks=case.chunks,
        checkpoint=checkpoint,
        reshard=case.reshard,
        schedule=SCHEDULES[case.schedule][1],
        sums_each=case.each,
    )


def predicted(case: Case, gpu: str, scale: float) -> Priced:
    """Time and memory of a case, as ``tilefit plan`` prices them."""
    return planner(case, gpu, scale).priced(split_of(case))


def ranks_bytes(case: Case, gpu: str) -> list[float]:
    """What the allocator of each rank holds at most: what is planned, cuBLAS's workspaces, and the inputs of
    layers alone, which a step of these programs has before it begins; of a pipeline all micro-batches', too,
    and, on the last stage, what comes of those, which its schedule returns."""
    training = planner(case, gpu, 1.0).training(split_of(case))
    stages = range(training.split.pipeline)
    held = [training.stage_memory(stage).total - CONTEXT_BYTES + WORKSPACES_BYTES for stage in stages]
    if case.layers:
        width = 2 * case.samples * case.seq * LLAMA[case.model][2] / (2 if case.sequence else 1)
        returned = case.parts if len(held) > 1 else 0
        held = [each + width * (1 + returned) for each in held]
        last = 0 if case.schedule == "ZBV" else -1
        held[last] += width * max(0, returned - 1)
    return held if len(held) > 1 else held * case.gpus


def predict(part: str) -> dict[str, Any]:
    """Times and bytes of the new kinds of steps."""
    cases = [case for kind, each in CASES.items() if kind.startswith(part) for case in each]
    made: dict[str, Any] = {"scales": SCALES}
    for gpu in ("h200", "h100-sxm"):
        made[gpu] = {}
        for case in cases:
            alone = predicted(case, gpu, NO_HOST).time
            made[gpu][case.name] = {
                "times_s": [round(predicted(case, gpu, scale).time.time_s, 6) for scale in SCALES],
                "gpu_s": round(alone.time_s, 6),
                "compute_s": round(alone.compute_s + alone.recompute_s + alone.optimizer_s, 6),
                "bytes": [round(each) for each in ranks_bytes(case, gpu)],
            }
            print(case.name, made[gpu][case.name], flush=True)
    return made


class Errors:
    """Relative errors by what they belong to."""

    def __init__(self) -> None:
        self.off: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, ratio: float) -> None:
        self.off[name].append(abs(ratio - 1))

    def report(self) -> dict[str, dict[str, float]]:
        return {
            name: {
                "rows": len(each),
                "median": round(statistics.median(each), 3),
                "p90": round(sorted(each)[int(0.9 * len(each))], 3),
                "worst": round(max(each), 3),
            }
            for name, each in self.off.items()
        }


def collectives_compared(gpu: str, rows: list[dict[str, Any]], errors: Errors) -> None:
    fabric = Fabric(gpus.get(gpu))
    for row in rows:
        if row["row"] == "collective" and row["size_bytes"] >= 64 * 1024:
            group = Group(row["ranks"], row["ranks"])
            ratio = fabric.time_s(row["function"], row["size_bytes"], group, sums=False) / row["time_s"]
            errors.add(f"collectives, {row['function']}", ratio)
            errors.add("collectives", ratio)


def before(case: Case, gpu: str) -> tuple[str, list[float], dict[str, Any]]:
    """What was predicted of a case before it was measured: of which kinds, for which scales; else nothing."""
    if case.again and not any(case in each for each in CASES.values()):
        case = replace(case, again=0)
    sections = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
    for part, section in sections.items():
        if case.name in section[gpu]:
            return part, section["scales"], section[gpu][case.name]
    return "", [], {}


def compared(path: Path) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Measured and predicted, a line for each step; and the errors."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    gpu = next(gpus.get(row["gpu"][0].split(",")[0]).name for row in rows if row["row"] == "machine")
    lines, errors, of_host = [], Errors(), 1.0
    collectives_compared(gpu, rows, errors)
    for row in rows:
        of_host = row.get("launch_scale", of_host) if row["row"] == "host" else of_host
        if row["row"] != "step" or "error" in row:
            continue
        case, scale = Case(**row["case"]), scale_of(row, of_host)
        time = predicted(case, gpu, scale).time
        measured_s, peaks = row["median_s"], [each["peak_bytes"] for each in (row, *row["others"])]
        parts = {name: 1e3 * value for name, value in asdict(time).items() if value > time.time_s / 100}
        kind = "one GPU" if case.gpus == 1 else "two GPUs"
        ahead = row.get("profile", {}).get("busy_s", 0.0) / PROFILED > 0.9 * measured_s  # the host
        part, scales, old = before(case, gpu)
        said = {"now": (time.time_s, ranks_bytes(case, gpu))}
        if old:
            said[part] = float(np.interp(scale, scales, old["times_s"])), old["bytes"]
        told = []
        for when, (time_s, held) in said.items():
            name = "" if when == "now" else f"predicted before, {when}, "
            theirs = (
                peaks if len(held) == len(peaks) else [max(peaks)]
            )  # of the first only the fullest was told
            off = [each / peak for each, peak in zip(held, theirs, strict=True)]
            errors.add(f"{name}steps, {kind}", time_s / measured_s)
            if ahead:
                errors.add(f"{name}steps, {kind}, limited by the GPU", time_s / measured_s)
            for each in off:
                errors.add(f"{name}memory, {kind}", each)
            told.append(f"{when} {time_s / measured_s:5.2f} {' '.join(f'{each:5.2f}' for each in off)}")
        lines.append(
            f"{case.name:52} {1e3 * measured_s:8.1f} ms {max(peaks) / 2**30:6.2f} GiB, host {scale:4.2f}   "
            f"{'   '.join(told)}   {'GPU' if ahead else 'host':4} "
            + ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in parts.items())
        )
    return lines, errors.report()


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


def host(kind: str) -> list[float]:
    """How long this host takes to launch, over the one whose constants the model has: of a rank beside the
    others, and of the first alone."""
    rank = dist.get_rank()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    found = [launch_scale(device)]
    dist.barrier()
    found += [launch_scale(device)] * (rank == 0)
    dist.barrier()
    return found


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
        waiting = [replace(each, again=each.again + options.again) for each in CASES.get(kind, [])]
        if tiny:
            waiting = [replace(case, seq=32 if case.seq else 0, samples=2) for case in waiting]
        collectives = kind == "collectives"
        while (waiting or collectives) and left() > 25:
            try:
                with Ranks(2, options.device) as ranks:
                    rows.write("host", launch_scales=ranks.call(host, options.device))
                    if collectives:
                        collectives = False
                        for each in measure(ranks, sizes):
                            rows.write("collective", **asdict(each))
                    while waiting and left() > 15:
                        case = waiting.pop(0)
                        limit_s = min(options.limit, left() - 5)
                        try:
                            answers = ranks.call(
                                run, case, options.device, tiny, options.profile, timeout_s=limit_s
                            )
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
    parser.add_argument("--rows", type=Path, help="written to, or compared")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which nothing more is begun")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a step's row may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", action="store_true", help="also what profiled steps consist of")
    parser.add_argument("--only", nargs="*", choices=("collectives", *CASES), default=())
    parser.add_argument("--again", type=int, default=0, help="for the so-manieth time")
    parser.add_argument("--record", action="store_true", help="write the errors into results/")
    parser.add_argument("--compare", action="store_true", help="with predictions; measures nothing")
    parser.add_argument("--predict", metavar="KINDS", help="write what is predicted for kinds so called")
    options = parser.parse_args()
    if options.predict:
        every = json.loads(PREDICTED.read_text()) | {options.predict: predict(options.predict)}
        PREDICTED.write_text(json.dumps(every, indent=1) + "\n")
    elif options.rows is None:
        parser.error("--rows is missing")
    elif options.compare:
        lines, report = compared(options.rows)
        print("\n".join(lines), json.dumps(report, indent=1), sep="\n")
        if options.record:
            every = json.loads(RESULTS.read_text()) | {
                options.rows.stem.removeprefix("several_gpus_"): report
            }
            RESULTS.write_text(json.dumps(every, indent=1) + "\n")
    else:
        measured(options)


if __name__ == "__main__":
    main()
