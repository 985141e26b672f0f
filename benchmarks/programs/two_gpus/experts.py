"""Experts, half of them on each GPU: torchrun --nproc-per-node 2 experts.py [--dropless [--uneven]]"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--samples", type=int, default=4)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--dropless", action="store_true", help="experts take what they are given")
parser.add_argument("--uneven", action="store_true", help="every token chooses the first expert, and another")
options = parser.parse_args()
CHOSEN = 2


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.experts_in_all = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts // dist.get_world_size()))

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.router(flat).float()
        if options.uneven:
            scores = scores + 9.0 * (torch.arange(self.experts_in_all, device=x.device) == 0)
        share, chosen = scores.softmax(-1).topk(CHOSEN, -1)
        run = self.dropless if options.dropless else self.padded
        return run(flat, share.to(x.dtype), chosen).view_as(x)

    def padded(self, flat, share, chosen):
        """Every expert takes as many tokens, the rest are dropped."""
        count, width = flat.shape
        room = CHOSEN * count // self.experts_in_all
        order = chosen.flatten().argsort(stable=True)
        rows = order.view(self.experts_in_all, room) // CHOSEN
        sent = flat[rows]
        got = all_to_all_single(torch.empty_like(sent), sent)
        mine = got.view(dist.get_world_size(), len(self.experts), room, width)
        out = torch.stack([expert(mine[:, i].flatten(0, 1)) for i, expert in enumerate(self.experts)])
        out = out.view(len(self.experts), dist.get_world_size(), room, width).transpose(0, 1).contiguous()
        back = all_to_all_single(torch.empty_like(out), out).view(-1, width)
        weighted = back * share.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, rows.flatten(), weighted)

    def dropless(self, flat, share, chosen):
        """Ranks tell each other how many tokens they send."""
        ranks, local = dist.get_world_size(), len(self.experts)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts_in_all)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sends = counts.view(ranks, local).sum(1).tolist()
        per_expert = theirs.view(ranks, local).tolist()
        takes = [sum(each) for each in per_expert]
        sent = flat[order // CHOSEN]
        got = all_to_all_single(sent.new_empty(sum(takes), sent.shape[1]), sent, takes, sends)
        pieces = got.split([count for each in per_expert for count in each])
        out = [
            expert(torch.cat(pieces[i::local])).split([each[i] for each in per_expert])
            for i, expert in enumerate(self.experts)
        ]
        mixed = torch.cat([out[i][r] for r in range(ranks) for i in range(local)])
        back = all_to_all_single(torch.empty_like(sent), mixed, sends, takes)
        weighted = back * share.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // CHOSEN, weighted)


class Layer(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.heads = width // 128
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mixture = Mixture(width, experts)

    def forward(self, x):
        qkv = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mixture(self.second(x))


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = nn.Sequential(*(Layer(options.width, options.experts) for _ in range(options.layers)))
model = model.to(device, torch.bfloat16)
shared = [p for name, p in model.named_parameters() if ".experts." not in name]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
batch = torch.randn(options.samples, options.length, options.width, device=device).to(torch.bfloat16)
for _ in range(options.steps):
    loss = model(batch).float().square().mean()
    loss.backward()
    for parameter in shared:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
