"""Captured with real data, code that depends on values sees the true ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capturing import captured
from tilefit.capture import capture

X = torch.randn(2, 4, 8, 8)
SEQUENCE = X[0]
ENDS = torch.tensor([3, 8], dtype=torch.int32)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(8, 8), nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x)
        return self.gru(x, hidden)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight, offs=ENDS)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*self.project(x).chunk(3, -1), is_causal=True)


@pytest.mark.parametrize("options", [{"train": False}, {"train": True}, {"amp": "bf16"}])
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Attention, X),
        (lambda: nn.LSTM(8, 8, 2, bidirectional=True), SEQUENCE),
        (lambda: nn.GRU(8, 8), SEQUENCE),
        (lambda: nn.RMSNorm(8), X),
        (Cells, SEQUENCE[0]),
        (Experts, X[0, 0]),
    ],
)
def test_what_cuda_fuses_has_its_values(
    make: Callable[[], nn.Module], x: torch.Tensor, options: dict[str, Any]
) -> None:
    model, seen = make(), []

    def output(outputs: Any) -> torch.Tensor:
        return outputs[0] if isinstance(outputs, tuple) else outputs

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = output(self.model(x))
        seen.append(out.detach().float().clone())
        return out

    captured(forward, x, parts={"model": model}, on_cpu=True, **options)
    tolerance = {"atol": 0.05, "rtol": 0.05} if "amp" in options else {}
    torch.testing.assert_close(seen[0], output(model(x)).detach(), **tolerance)


def test_gradients_of_what_cuda_fuses_are_finite() -> None:
    model, norms = Attention(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()

    capture(train, (X,), on_cpu=True)
    assert torch.isfinite(torch.tensor(norms)).all()


def test_inference_is_taken_apart_as_training_is() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2))
    on_shapes, real = (
        [entry.name for entry in capture(model, X, train=False, on_cpu=on_cpu).ops]
        for on_cpu in (False, True)
    )
    assert real == on_shapes
