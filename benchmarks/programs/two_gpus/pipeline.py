"""Layers of a Llama in a pipeline: torchrun --nproc-per-node 2 pipeline.py --schedule 1f1b"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="1f1b")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--parts", type=int, default=8)
parser.add_argument("--samples", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 7 * width // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def loss_of(x, target):
    return (x - target).float().square().mean()


def by_hand(stage, batch, target):
    """All forward passes, then all backward passes, with messages of our own."""
    samples = options.samples
    held = []
    for part in range(options.parts):
        x = batch[part * samples : (part + 1) * samples]
        if rank:
            x = torch.empty_like(x)
            dist.recv(x, 0)
            x.requires_grad_()
        y = stage(x)
        if rank:
            y = loss_of(y, target[part * samples : (part + 1) * samples]) / options.parts
        else:
            dist.send(y.detach(), 1)
        held.append((x, y))
    for x, y in held:
        if rank:
            y.backward()
            dist.send(x.grad, 0)
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)


dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
names = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
chunks = 2 if options.schedule in ("interleaved", "zero-bubble") else 1
each = options.layers // (2 * chunks)
with device:
    parts = [
        nn.Sequential(*(Layer(options.width, options.width // 128) for _ in range(each))).to(torch.bfloat16)
        for _ in range(chunks)
    ]
    batch = torch.randn(options.parts * options.samples, options.length, options.width).to(torch.bfloat16)
    target = torch.randn_like(batch)
stages = [PipelineStage(part, rank + 2 * i, 2 * chunks, device) for i, part in enumerate(parts)]
if options.schedule in names:
    kind = getattr(schedules, names[options.schedule])
    schedule = kind(stages if chunks > 1 else stages[0], options.parts, loss_fn=loss_of)
parameters = [parameter for part in parts for parameter in part.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
for _ in range(options.steps):
    if options.schedule == "by-hand":
        by_hand(parts[0], batch, target)
    elif rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=target)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
