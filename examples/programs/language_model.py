"""GPT-2 from scratch on a file of tokens: accumulation, autocast, clipping, a cosine schedule, compile.

tilefit check examples/programs/language_model.py --gpu h200 --fake-data -- --layers 6
"""

import argparse
import math
import os
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width, heads, layers, dropout=0.0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, targets=None):
        y = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            y = block(y)
        logits = self.head(self.norm(y))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data/openwebtext")
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
context = nullcontext() if device == "cpu" else torch.amp.autocast(device, dtype=getattr(torch, dtype))


def get_batch(split):
    data = np.memmap(os.path.join(options.data, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - options.length, (options.batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + options.length].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + options.length].astype(np.int64)) for i in starts])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    means = {}
    for split in ("train", "val"):
        losses = torch.zeros(10)
        for index in range(10):
            x, y = get_batch(split)
            with context:
                losses[index] = model(x, y)[1].item()
        means[split] = losses.mean()
    model.train()
    return means


def rate(step, warmup=2000, decay=600000, most=6e-4, least=6e-5):
    if step < warmup:
        return most * (step + 1) / (warmup + 1)
    share = min((step - warmup) / (decay - warmup), 1)
    return least + 0.5 * (1 + math.cos(math.pi * share)) * (most - least)


model = GPT(50304, options.length, 768, 12, options.layers).to(device)
scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device == "cuda")
if options.compile:
    model = torch.compile(model)

x, y = get_batch("train")
began = time.time()
for step in range(600000):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    if step % 2000 == 0:
        losses = estimate_loss(model)
        print(f"step {step}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        if step > 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    for _ in range(options.accumulate):
        with context:
            _, loss = model(x, y)
            loss = loss / options.accumulate
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item() * options.accumulate:.4f}, {time.time() - began:.1f} s")
