"""INT005."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilefit.capture import capture
from whatif import findings, saved_s


class PerPosition(nn.Module):
    """One layer over all positions, one after another or at once."""

    def __init__(self, *, looped: bool) -> None:
        super().__init__()
        self.looped = looped
        self.layer = nn.Linear(1024, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(row) for row in x]) if self.looped else self.layer(x)


class Repeated(nn.Module):
    """The same layer again and again, each time on its own output (as ALBERT shares its layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = self.layer(x)
        return x


X = torch.empty(64, 16, 1024, device="meta")


@pytest.mark.parametrize("train", [True, False])
def test_a_loop_over_known_inputs_is_one_product(train: bool) -> None:
    looped = capture(PerPosition(looped=True), X, train=train, fused_optimizer=True)
    at_once = capture(PerPosition(looped=False), X, train=train, fused_optimizer=True)
    (finding,) = findings(looped, "INT005")
    assert "64 times" in finding.message
    # The rule leaves alone what surrounds the products (slices, biases, the stacking).
    assert 0.4 * saved_s(looped, at_once) < finding.gain_s <= 1.05 * saved_s(looped, at_once)


def test_products_that_wait_for_each_other_are_left_alone() -> None:
    assert not findings(capture(Repeated(), X[0]), "INT005", min_gain=0)


@pytest.mark.parametrize("accumulated", [True, False])
def test_micro_batches_are_no_time_steps(accumulated: bool) -> None:
    model = nn.Linear(1024, 2048, device="meta")

    def step(x: torch.Tensor) -> None:
        losses = []
        for row in x:
            losses.append(model(row).square().mean())
            if accumulated:
                losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()

    assert bool(findings(capture(step, (X,)), "INT005", min_gain=0)) != accumulated
