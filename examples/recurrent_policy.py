"""A recurrent policy over rollouts in which episodes end and others begin: one call with a reset mask.

Without the mask, the rollout has to be cut at every end of an episode, or looped over step by step.

Run it with: python examples/recurrent_policy.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tilefit

STEPS, ENVIRONMENTS, OBSERVATION, HIDDEN, ACTIONS = 64, 8, 16, 64, 4


class Policy(nn.Module):
    """Observations to action scores, with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(OBSERVATION, HIDDEN)
        self.head = nn.Linear(HIDDEN, ACTIONS)

    def forward(self, observations: Tensor, **options: Tensor) -> Tensor:
        """[steps, environments, observation] to [steps, environments, actions]."""
        scores: Tensor = self.head(self.memory(observations, **options)[0])
        return scores


def step_by_step(policy: Policy, observations: Tensor, begins: Tensor) -> Tensor:
    """The same by a loop that zeroes the memory of an environment whose episode begins."""
    scores = []
    h = c = torch.zeros(1, ENVIRONMENTS, HIDDEN)
    for observation, begin in zip(observations, begins, strict=True):
        h, c = (torch.where(begin.unsqueeze(-1), 0, state) for state in (h, c))
        out, (h, c) = policy.memory(observation.unsqueeze(0), (h, c))
        scores.append(policy.head(out[0]))
    return torch.stack(scores)


def main() -> None:
    torch.manual_seed(0)
    policy = tilefit.nn.convert(Policy())
    observations = torch.randn(STEPS, ENVIRONMENTS, OBSERVATION)
    begins = torch.rand(STEPS, ENVIRONMENTS) < 0.1

    scores = policy(observations, reset=begins)
    difference = (scores - step_by_step(policy, observations, begins)).abs().max().item()
    print(f"{int(begins.sum())} episodes begin within the rollout")
    print(f"one call against a loop over {STEPS} steps: largest difference {difference:.1e}")
    print(tilefit.nn.explain(policy, observations, reset=begins, gpu="h200"))


if __name__ == "__main__":
    main()
