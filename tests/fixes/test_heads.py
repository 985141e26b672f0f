"""PyTorch's own attention on padded heads: the same function, in whatever it is part of."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from in_use import applied, difference, gradients, on_meta, planned
from tilefit.fixes.changes.behaviour import Edits
from tilefit.fixes.kinds.attention.heads import FittedHeads

WIDTH, HEADS, LENGTH, KEYS = 20, 4, 6, 5
AHEAD = torch.ones(LENGTH, LENGTH).triu(1) > 0
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "added": {"attn_mask": torch.linspace(-2, 2, LENGTH * LENGTH).view(LENGTH, LENGTH)},
    "of each head": {"attn_mask": torch.linspace(-2, 2, 3 * HEADS * LENGTH**2).view(-1, LENGTH, LENGTH)},
    "causal": {"attn_mask": AHEAD, "is_causal": True},
    "causal, of words": {
        "attn_mask": AHEAD,
        "is_causal": True,
        "key_padding_mask": torch.arange(LENGTH)[None] > torch.tensor([[6], [3], [1]]),
    },
}


def twins(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A module in fp64, and the same with the fix."""
    plain = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    fitted = copy.deepcopy(plain)
    Edits().give(fitted, "", FittedHeads())
    return plain, fitted


def learned(module: nn.Module, *inputs: torch.Tensor, **masks: Any) -> Any:
    given = [each.detach().clone().requires_grad_() for each in inputs]
    # As a layer calls it: with one tensor, or with one for keys and values.
    query, key = given[0], given[-1]
    masks = {
        n: m.double() if isinstance(m, torch.Tensor) and m.is_floating_point() else m
        for n, m in masks.items()
    }
    y, weights = module(query, key, key, need_weights=False, **masks)
    (y + 0.1).square().sum().backward()
    return y, weights, [each.grad for each in given], gradients(module)


def head_sizes(call: Any) -> set[int]:
    """Of the heads that reach the kernels within a call."""
    found = set()
    plain = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.add(query.shape[-1])
        return plain(query, *args, **kwargs)

    with patch.object(F, "scaled_dot_product_attention", attention):
        call()
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_the_same_attention(mask: str, batch_first: bool, bias: bool) -> None:
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    plain, fitted = twins(batch_first=batch_first, bias=bias)
    expected = learned(plain, x, **MASKS[mask])
    assert not difference(expected, learned(fitted, x, **MASKS[mask]), 1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_it_is_the_same_cross_attention(batch_first: bool) -> None:
    x, memory = (torch.randn(3, length, WIDTH, dtype=torch.float64) for length in (LENGTH, KEYS))
    if not batch_first:
        x, memory = (each.transpose(0, 1).contiguous() for each in (x, memory))
    plain, fitted = twins(batch_first=batch_first)
    pads = {"key_padding_mask": torch.arange(KEYS)[None] > torch.tensor([[5], [3], [1]])}
    assert not difference(learned(plain, x, memory, **pads), learned(fitted, x, memory, **pads), 1e-12)


def test_an_encoder_that_was_planned_under_autocast_runs_on_padded_heads_afterwards() -> None:
    """What a capture answers for PyTorch while the plan is made is not what the module is held to."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True), 2)
    plan = planned(model, on_meta(2, 8, WIDTH), "fit-heads")
    assert applied(plan) == {"fit-heads"}
    x = torch.randn(2, 8, WIDTH)
    assert head_sizes(lambda: model(x)) == {8}
    with torch.autocast("cpu", torch.bfloat16):
        assert head_sizes(lambda: model(x)) == {8}
    plan.undo()
    assert head_sizes(lambda: model(x)) == {5}


def test_a_whole_transformer_is_the_same() -> None:
    plain = nn.Transformer(WIDTH, HEADS, 1, 1, 32, dropout=0.0, batch_first=True)
    model = copy.deepcopy(plain)
    assert applied(planned(model, (on_meta(2, 8, WIDTH), on_meta(2, 7, WIDTH)), "fit-heads"))
    source, target = (torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (8, 7))
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)

    def used(model: nn.Module) -> Any:
        y = model.double()(source, target, tgt_mask=causal, tgt_is_causal=True)
        (y * torch.linspace(0, 1, y.numel()).view_as(y)).sum().backward()
        return y, gradients(model)

    assert not difference(used(plain), used(model), 1e-9)


def test_weights_that_are_asked_for_and_wrong_arguments_are_as_before() -> None:
    plain, fitted = twins(batch_first=True)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    other = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    calls: list[Any] = [
        lambda m: m(x, x, x),
        lambda m: m(x, x, x, average_attn_weights=False),
        lambda m: m(x, x, other, need_weights=False)[0],
        lambda m: m(x[0], x[0], x[0], need_weights=False)[0],
        lambda m: m(x, x, x, None, False)[0],
    ]
    for call in calls:
        assert not difference(call(plain), call(fitted), 1e-12)
    wrong: list[Any] = [
        lambda m: m(x[..., 1:], x, x, need_weights=False),
        lambda m: m(x, x, x, need_weights=False, is_causal=True),
        lambda m: m(x, x, x, need_weights=False, attn_mask=torch.zeros(3, 3)),
        lambda m: m(x, x, x, need_weights=False, key_padding_mask=torch.zeros(1, LENGTH) > 0),
        lambda m: m(x),
    ]
    for call in wrong:
        for module in (plain, fitted):
            with pytest.raises((RuntimeError, AssertionError, TypeError)):
                call(module)


def test_evaluation_keeps_pytorchs_own_path() -> None:
    plain, fitted = twins(batch_first=True)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        pair = [module.eval()(x, x, x, need_weights=False)[0] for module in (plain, fitted)]
    assert torch.equal(*pair)


@pytest.mark.parametrize("options", [{"kdim": 8, "vdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_it_cannot_compute_is_refused(options: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory = x[..., : self.attention.kdim]
            return self.attention(x, memory, memory, need_weights=False)[0]

    plan = planned(Model(), on_meta(2, 8, WIDTH), "fit-heads")
    assert not plan.fixes
    assert any("attention" in each.reason for each in plan.refused)
