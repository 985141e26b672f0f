"""Clouds of points: one network for each point, the largest over all, batch norm over points."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
opt = parser.parse_args()
BATCH, POINTS = 32, 2500


class Turn(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.c1, self.c2, self.c3 = nn.Conv1d(k, 64, 1), nn.Conv1d(64, 128, 1), nn.Conv1d(128, 1024, 1)
        self.f1, self.f2, self.f3 = nn.Linear(1024, 512), nn.Linear(512, 256), nn.Linear(256, k * k)
        self.b = nn.ModuleList(nn.BatchNorm1d(n) for n in (64, 128, 1024, 512, 256))

    def forward(self, x):
        x = F.relu(self.b[0](self.c1(x)))
        x = F.relu(self.b[1](self.c2(x)))
        x = F.relu(self.b[2](self.c3(x)))
        x = torch.max(x, 2)[0]
        x = F.relu(self.b[3](self.f1(x)))
        x = F.relu(self.b[4](self.f2(x)))
        return (self.f3(x) + torch.eye(self.k, device=x.device).flatten()).view(-1, self.k, self.k)


class Cloud(nn.Module):
    def __init__(self, classes=16):
        super().__init__()
        self.turn, self.turn2 = Turn(3), Turn(64)
        self.c1, self.c2, self.c3 = nn.Conv1d(3, 64, 1), nn.Conv1d(64, 128, 1), nn.Conv1d(128, 1024, 1)
        self.b1, self.b2, self.b3 = nn.BatchNorm1d(64), nn.BatchNorm1d(128), nn.BatchNorm1d(1024)
        self.head = nn.Sequential(
            nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(),
            nn.Linear(512, 256), nn.Dropout(0.3), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, classes),
        )  # fmt: skip

    def forward(self, x):
        x = torch.bmm(x.transpose(2, 1), self.turn(x)).transpose(2, 1)
        x = F.relu(self.b1(self.c1(x)))
        turn = self.turn2(x)
        x = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        x = F.relu(self.b2(self.c2(x)))
        x = torch.max(self.b3(self.c3(x)), 2)[0]
        return F.log_softmax(self.head(x), dim=1), turn


net = Cloud()
net.cuda()
optimizer = optim.Adam(net.parameters(), lr=0.001, betas=(0.9, 0.999))
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
for i in range(opt.steps):
    points, target = torch.rand(BATCH, POINTS, 3), torch.randint(16, (BATCH,))
    points = points.transpose(2, 1)
    points, target = points.cuda(), target.cuda()
    optimizer.zero_grad()
    net = net.train()
    pred, turn = net(points)
    loss = F.nll_loss(pred, target)
    eye = torch.eye(64, device=turn.device)[None]
    loss += 0.001 * torch.mean(torch.norm(torch.bmm(turn, turn.transpose(2, 1)) - eye, dim=(1, 2)))
    loss.backward()
    optimizer.step()
    correct = pred.data.max(1)[1].eq(target.data).cpu().sum()
    print("[%d] loss %f accuracy %f" % (i, loss.item(), correct.item() / float(BATCH)))
