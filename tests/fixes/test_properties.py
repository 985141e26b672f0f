"""Random architectures, padded wherever that is possible, compute what they did."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tilefit
from fixing import fixed
from tilefit.fixes.kinds.padding import tensors as padding
from tilefit.fixes.kinds.padding.tensors import SMALL

SIZES = st.sampled_from([1, 3, 7, 8, 13, 16, 21, 24, 31])
ACTIVATIONS = [nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Identity]


class Gate(nn.Module):
    """A gated layer of any sizes, its activation in place or not."""

    def __init__(self, width: int, inner: int, activation: type[nn.Module], bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias), nn.Linear(width, inner, bias)
        self.act = activation()
        self.down = nn.Linear(inner, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.gate(x)) * self.up(x) / 2)


class Shared(nn.Module):
    """One layer, called several times."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Split(nn.Module):
    """The output of a layer is taken apart."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.both(x).chunk(2, -1)
        return self.out(a.sigmoid() * b)


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, int]:
    """A model and the features of its input."""
    first = width = draw(SIZES)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["linear", "gate", "shared", "split", "norm", "dropout"]))
        if kind == "linear":
            new = draw(SIZES)
            layers += [nn.Linear(width, new, bias=draw(st.booleans()))]
            layers += [nn.ReLU(inplace=True)] if draw(st.booleans()) else []
            layers += [draw(st.sampled_from(ACTIVATIONS))() for _ in range(draw(st.integers(0, 2)))]
            width = new
        elif kind == "gate":
            layers += [Gate(width, draw(SIZES), draw(st.sampled_from(ACTIVATIONS)), draw(st.booleans()))]
        elif kind == "shared":
            layers += [Shared(width, draw(st.integers(1, 3)))]
        elif kind == "split":
            layers += [Split(width, draw(SIZES))]
        elif kind == "norm" and width > 1:
            layers += [nn.LayerNorm(width)]
        else:
            layers += [nn.Dropout(0.3)]
    if draw(st.booleans()):
        layers = [nn.Sequential(*layers)]
    model = nn.Sequential(*layers, nn.Linear(width, draw(SIZES)))
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.integers(0, 9)) > 0)
    return model, first


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@given(models(), st.sampled_from([(6,), (2, 3), (1, 2, 2)]), st.integers(0, 3), st.sampled_from([0, SMALL]))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_padded_model_is_the_same_function(
    drawn: Any, leading: tuple[int, ...], seed: int, small: int
) -> None:
    model, features = drawn
    torch.manual_seed(seed)
    x = torch.empty(*leading[:-1], 4096, features, device="meta", requires_grad=True)
    changed = fixed(model, x, select=["ALN"], verify=False).model
    inputs = torch.randn(*leading, features, dtype=torch.double)
    with patch.object(padding, "SMALL", small):
        result = tilefit.verify(model, changed, inputs)
    assert result.ok, f"{result}\n{changed}"
    assert {n: p.shape for n, p in changed.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
