"""GPT-2 under DDP, its optimizer's state shared: torchrun --nproc-per-node 2 replicas.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--samples", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--whole", action="store_true", help="every rank has all of the optimizer's state")
options = parser.parse_args()

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
config = GPT2Config(
    n_layer=options.layers, n_embd=options.width, n_head=options.width // 64, n_positions=options.length
)
with device:
    model = GPT2LMHeadModel(config)
model = DistributedDataParallel(model, device_ids=[device.index])
if options.whole:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
else:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
for _ in range(options.steps):
    tokens = torch.randint(0, 50257, (options.samples, options.length)).to(device)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
