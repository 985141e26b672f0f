"""Proximal policy optimization on a cart with a pole: the environment runs on the CPU.

tilefit check examples/programs/reinforcement.py --gpu h200
"""

import math

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical


class CartPoles:
    """Several carts, each with a pole that is to stay upright."""

    def __init__(self, count):
        self.state = np.random.uniform(-0.05, 0.05, (count, 4))

    def step(self, actions):
        _, speed, angle, turn = self.state.T
        force = np.where(actions == 1, 10.0, -10.0)
        push = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
        lean = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        rate = push - 0.05 * lean * np.cos(angle) / 1.1
        self.state = self.state + 0.02 * np.stack([speed, rate, turn, lean], axis=1)
        fallen = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 12 * math.pi / 180)
        self.state[fallen] = np.random.uniform(-0.05, 0.05, (int(fallen.sum()), 4))
        return self.state.astype(np.float32), np.ones(len(fallen), np.float32), fallen


class Agent(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def act(self, state, action=None):
        policy = Categorical(logits=self.actor(state))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(state).squeeze(-1)


def main(environments=16, horizon=32):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    world = CartPoles(environments)
    state = torch.tensor(world.state, dtype=torch.float32, device=device)
    for update in range(500):
        states, actions, chances, values, rewards, ends = [], [], [], [], [], []
        for _ in range(horizon):
            with torch.no_grad():
                action, chance, _, value = agent.act(state)
            new, reward, fallen = world.step(action.cpu().numpy())
            for kept, each in zip(
                (states, actions, chances, values), (state, action, chance, value), strict=True
            ):
                kept.append(each)
            rewards.append(torch.tensor(reward, device=device))
            ends.append(torch.tensor(fallen, dtype=torch.float32, device=device))
            state = torch.from_numpy(new).to(device)
        with torch.no_grad():
            following = agent.act(state)[3]
        advantages, last = [], torch.zeros(environments, device=device)
        for step in reversed(range(horizon)):
            error = rewards[step] + 0.99 * following * (1 - ends[step]) - values[step]
            last = error + 0.99 * 0.95 * (1 - ends[step]) * last
            following = values[step]
            advantages.insert(0, last)
        batch = [torch.cat(each) for each in (states, actions, chances, values, advantages)]
        returns = batch[4] + batch[3]
        for _ in range(4):
            for part in torch.randperm(environments * horizon, device=device).split(128):
                _, chance, entropy, value = agent.act(batch[0][part], batch[1][part])
                ratio = (chance - batch[2][part]).exp()
                gain = batch[4][part]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                loss = policy_loss - 0.01 * entropy.mean() + 0.5 * (value - returns[part]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        print(f"update {update}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
