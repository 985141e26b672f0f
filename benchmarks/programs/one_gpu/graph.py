"""Messages over a graph of a million edges: gather, a small network, index_add, in float32."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=200)
o = p.parse_args()
NODES, EDGES, WIDTH = 100_000, 1_000_000, 128


class Messages(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.own = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, source, target, degree):
        m = F.gelu(self.message(torch.cat([x[source], x[target]], dim=-1)))
        total = torch.zeros_like(x).index_add_(0, target, m) / degree
        return x + self.norm(self.own(x) + total)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(100, WIDTH)
        self.layers = nn.ModuleList([Messages(WIDTH) for _ in range(3)])
        self.decode = nn.Linear(WIDTH, 47)

    def forward(self, x, source, target, degree):
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, source, target, degree)
        return self.decode(x)


device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
features = torch.randn(NODES, 100).to(device)
source, target = torch.randint(NODES, (2, EDGES)).to(device)
degree = torch.bincount(target, minlength=NODES).clamp(min=1).unsqueeze(1).to(device)
labels = torch.randint(47, (NODES,), device=device)
train = torch.rand(NODES, device=device) < 0.6
net = Net().to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(o.steps):
    net.train()
    optimizer.zero_grad()
    out = net(features, source, target, degree)
    loss = F.cross_entropy(out[train], labels[train])
    loss.backward()
    optimizer.step()
    print("epoch", epoch, "loss", loss.item())
