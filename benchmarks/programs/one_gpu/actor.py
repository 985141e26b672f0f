"""Proximal policy optimisation: a small network of convolutions and many short updates; the host leads."""

import argparse

import torch
from torch import nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
args = parser.parse_args()
device = torch.device("cuda")
SAMPLES, BATCH, ACTIONS = 1024, 256, 6


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
        )  # fmt: skip
        self.actor, self.critic = nn.Linear(512, ACTIONS), nn.Linear(512, 1)

    def forward(self, seen):
        hidden = self.body(seen / 255.0)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
seen = torch.randint(0, 256, (SAMPLES, 4, 84, 84), dtype=torch.uint8).float().to(device)
actions = torch.randint(0, ACTIONS, (SAMPLES,), device=device)
before, gains, returns = (torch.randn(SAMPLES, device=device) for _ in range(3))
done = 0
while done < args.steps:
    order = torch.randperm(SAMPLES, device=device)
    for start in range(0, SAMPLES, BATCH):
        chosen = order[start : start + BATCH]
        policy, value = agent(seen[chosen])
        ratio = (policy.log_prob(actions[chosen]) - before[chosen]).exp()
        gain = gains[chosen]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        lost = torch.max(-gain * ratio, -gain * ratio.clamp(0.9, 1.1)).mean()
        loss = lost - 0.01 * policy.entropy().mean() + 0.25 * (value - returns[chosen]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        done += 1
        if done >= args.steps:
            break
    print(done, loss.item())
