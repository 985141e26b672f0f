"""A recommender in the style of DLRM: 26 embedding tables, their products, two perceptrons.

tilefit check examples/programs/recommender.py --gpu h200
"""

from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

TABLES, ROWS, WIDTH, DENSE = 26, 100_000, 64, 13


class Clicks(IterableDataset):
    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        while True:
            dense = torch.rand(self.batch, DENSE)
            indices = torch.randint(ROWS, (TABLES, self.batch * 4))
            offsets = torch.arange(0, self.batch * 4, 4).repeat(TABLES, 1)
            yield dense, indices, offsets, torch.randint(2, (self.batch,)).float()


def perceptron(*sizes):
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        self.bottom = perceptron(DENSE, 512, 256, WIDTH)
        self.top = perceptron(WIDTH + (TABLES + 1) * TABLES // 2, 512, 256, 1)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        features = [x] + [table(i, o) for table, i, o in zip(self.tables, indices, offsets)]  # noqa: B905
        t = torch.stack(features, dim=1)
        z = torch.bmm(t, t.transpose(1, 2))
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1, device=z.device)
        return self.top(torch.cat([x, z[:, rows, columns]], dim=1)).squeeze(1)


def main():
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = Recommender().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    total = 0.0
    for step, batch in enumerate(DataLoader(Clicks(2048), batch_size=None, num_workers=2)):
        dense, indices, offsets, clicked = (each.to(device) for each in batch)
        loss = criterion(model(dense, indices, offsets), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 100 == 0:
            print(f"step {step}: {total / (step + 1):.4f}")


if __name__ == "__main__":
    main()
