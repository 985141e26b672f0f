"""Clicks: 26 tables of embeddings, products of pairs of features, networks below and above, plain SGD and Adagrad."""

import argparse
import itertools

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=8192)
args = parser.parse_args()
TABLES, ROWS, WIDTH = 26, 50_000, 64


def network(*sizes, last=nn.ReLU):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last())


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)
        )
        self.bottom = network(13, 512, 256, WIDTH)
        self.top = network(WIDTH + (TABLES + 1) * TABLES // 2, 1024, 512, 1, last=nn.Sigmoid)
        self.register_buffer("pairs", torch.tril_indices(TABLES + 1, TABLES + 1, -1))

    def forward(self, dense, chosen):
        low = self.bottom(dense)
        rows = [low, *(table(chosen[:, n : n + 1]) for n, table in enumerate(self.tables))]
        features = torch.stack(rows, 1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat([low, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


device = torch.device("cuda", 0)
model = Ranker().to(device)
dense_optimizer = torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=0.01)
sparse_optimizer = torch.optim.SGD(model.tables.parameters(), lr=0.1)
loss_fn = nn.BCELoss()
for step in range(args.steps):
    dense = torch.rand(args.batch, 13).log1p().to(device)
    chosen = torch.randint(ROWS, (args.batch, TABLES)).to(device)
    clicked = (torch.rand(args.batch) < 0.3).float().to(device)
    loss = loss_fn(model(dense, chosen), clicked)
    dense_optimizer.zero_grad()
    sparse_optimizer.zero_grad()
    loss.backward()
    dense_optimizer.step()
    sparse_optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
