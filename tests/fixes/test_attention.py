"""Attention written by hand, fused: the same function, whatever way it is written."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilefit
from in_use import difference, tried
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.attention.attention import fusing

WIDTH, HEADS = 24, 3
Core = Callable[..., torch.Tensor]


class Attention(nn.Module):
    """Projections around one way of writing attention: ``core(module, q, k, v, mask)``."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.2)
        self.softmax = nn.Softmax(dim=-1)
        self.position = nn.Parameter(torch.randn(HEADS, 9, 9))
        self.register_buffer("causal", torch.ones(16, 16).tril().view(1, 1, 16, 16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return x + self.out(self.core(self, q, k, v, mask).transpose(1, 2).reshape(x.shape))


def plain(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return F.softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-1) @ v


def added(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    return F.softmax(scores + mask, dim=-1) @ v


def min_gpt(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    size = q.size(2)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(m.causal[:, :, :size, :size] == 0, float("-inf"))
    return m.dropout(F.softmax(att, dim=-1)) @ v


def annotated(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
    return torch.matmul(m.dropout(m.softmax(scores)), v)


def extended(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores + (1.0 - mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
    return torch.matmul(m.dropout(scores.float().softmax(dim=-1).type_as(v)), v)


def relative(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = torch.matmul(q, k.mT)
    scores += m.position[:, : q.shape[2], : q.shape[2]]
    scores *= 0.3
    return F.dropout(scores.softmax(-1), 0.1, m.training) @ v


def where(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    size = q.shape[-2]
    scores = q @ k.mT / torch.full([], size**0.5, dtype=q.dtype, device=q.device)
    keep = m.causal[..., :size, :size].bool()
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    scores = torch.where(keep, scores, lowest)
    if mask is not None:
        scores = scores.where(mask[:, None, None].bool().expand_as(scores), torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def batched(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    batch, heads, size, width = q.shape
    q, k, v = (t.reshape(batch * heads, size, width) for t in (q * width**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        scores = scores.view(batch, heads, size, size).masked_fill(~mask[:, None, None].bool(), -math.inf)
        scores = scores.view(batch * heads, size, size)
    return torch.bmm(m.dropout(F.softmax(scores, dim=2)), v).view(batch, heads, size, width)


def einsum(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = torch.einsum("bhid, bhjd -> bhij", q, k) / 2
    scores.masked_fill_(
        torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1), -math.inf
    )
    return torch.einsum("bhij,bhjd->bihd", m.softmax(scores), v).transpose(1, 2)


def ellipsis(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("...qk,...kd->...qd", weights, v.transpose(1, 2))


def triangular(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    size = q.shape[2]
    future = torch.triu(torch.full((size, size), float("-inf"), device=q.device), diagonal=1)
    return (q @ k.mT * 0.25 + future).softmax(-1) @ v


def windowed(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    size = q.shape[2]
    distance = torch.arange(size, device=q.device)[:, None] - torch.arange(size, device=q.device)
    return (q @ k.mT).masked_fill(distance.abs() > 2, -math.inf).softmax(-1) @ v


def traced_letters(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


WRITTEN = [
    plain, min_gpt, annotated, extended, relative, where, batched, einsum, ellipsis, triangular, windowed,
]  # fmt: skip


def inputs(masked: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 9, WIDTH, dtype=torch.double)
    return {"x": x, "mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3])} if masked else {"x": x}


def fused(model: nn.Module, *paths: str) -> nn.Module:
    run = Run(copy.deepcopy(model))
    fusing(paths or ("",)).apply(run)
    return run.model


def made(core: Core) -> nn.Module:
    torch.manual_seed(0)
    return Attention(core).double()


def kernel_calls(model: nn.Module, *args: Any, **kwargs: Any) -> list[Any]:
    """The arguments of every call of the fused kernel."""
    calls = []
    kernel = F.scaled_dot_product_attention
    with patch.object(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or kernel(*a, **k)):
        model(*args, **kwargs)
    return calls


@pytest.mark.parametrize("core", WRITTEN)
@pytest.mark.parametrize("masked", [False, True])
def test_same_function(core: Core, masked: bool) -> None:
    original = made(core)
    assert len(kernel_calls(fused(original), **inputs(masked))) == 1
    # On the CPU even dropout draws the same numbers.
    result = tilefit.verify(original, fused(original), inputs(masked), steps=1)
    assert result.ok, result
    assert result.compared > 30


class Traceable(Attention):
    """Its sizes are not read."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.out(self.core(self, q, k, v, mask).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("core", [plain, ellipsis, traced_letters])
def test_it_is_traced_as_it_is_written(core: Core) -> None:
    original = nn.Sequential(Traceable(core).double())
    traced, x = torch.fx.symbolic_trace(fused(original, "0")), inputs(masked=False)["x"]
    assert "scaled_dot_product_attention" not in traced.code
    torch.testing.assert_close(traced(x), original(x))


@pytest.mark.parametrize("core", [min_gpt, einsum, triangular, where])
def test_constant_causal_masks_become_a_flag(core: Core) -> None:
    (call,) = kernel_calls(fused(made(core)), **inputs(masked=False))
    assert call["is_causal"]
    assert call["attn_mask"] is None


@pytest.mark.parametrize("core", [windowed, annotated, where])
def test_other_masks_stay_masks(core: Core) -> None:
    (call,) = kernel_calls(fused(made(core)), **inputs(masked=True))
    assert not call["is_causal"]
    assert call["attn_mask"] is not None


def test_a_buffer_that_changes_is_looked_at_again() -> None:
    original = made(min_gpt).eval()
    model, x = fused(original), inputs(masked=False)["x"]
    assert kernel_calls(model, x)[0]["is_causal"]
    for module in (original, model):
        module.causal[..., 0, 1] = 1
    assert not kernel_calls(model, x)[0]["is_causal"]
    torch.testing.assert_close(model(x), original(x))


def test_a_method_of_tensors_that_was_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    original, args = made(extended).eval(), inputs(masked=True)
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda scores, dim: softmax(scores * 0.5, dim))
    torch.testing.assert_close(fused(original)(**args), original(**args))


def test_rows_without_any_key() -> None:
    """A finite number in every place of a row makes all its weights equal."""
    original, x = made(annotated), inputs(masked=True)
    x["mask"][1] = 0
    result = tilefit.verify(original, fused(original), x)
    assert result.ok, result


def test_dropout_and_scale_are_kept() -> None:
    (call,) = kernel_calls(fused(made(min_gpt)), **inputs(masked=False))
    assert call["dropout_p"] == 0.2
    assert call["scale"] == pytest.approx(8**-0.5)
    (call,) = kernel_calls(fused(made(min_gpt)).eval(), **inputs(masked=False))
    assert call["dropout_p"] == 0


@pytest.mark.parametrize("core", [min_gpt, annotated, extended, batched])
def test_autocast(core: Core) -> None:
    original, args = made(core).float().eval(), inputs(masked=True)
    args["x"] = args["x"].float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = original(**args), fused(original)(**args)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_half_precision() -> None:
    original, args = made(extended).bfloat16().eval(), inputs(masked=True)
    args["x"] = args["x"].bfloat16()
    found = fused(original)(**args)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, original(**args), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("function", ["masked_fill", "where"])
def test_fills_that_half_precision_has_not(function: str) -> None:
    def attention(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        scores, none = q @ k.mT, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(-1).logical_not()
        if function == "where":
            return torch.where(none, -1e9, scores).softmax(-1) @ v
        return scores.masked_fill(none, -1e9).softmax(-1) @ v

    original, x = made(attention).half().eval(), torch.randn(2, 7, WIDTH, dtype=torch.half)
    expected, found = tried(lambda: original(x)), tried(lambda: fused(original)(x))
    assert not difference(expected, found, 2e-3)


def test_sizes_and_masks_may_change_from_call_to_call() -> None:
    original = made(annotated).eval()
    model = fused(original)
    for length in (3, 9, 1):
        x = torch.randn(2, length, WIDTH, dtype=torch.double)
        mask = torch.ones(2, length)
        mask[0, -1] = 0
        for args in ((x,), (x, mask)):
            torch.testing.assert_close(model(*args), original(*args))


# ---- what is no attention ----------------------------------------------------------------------


def squared(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (q @ k.mT).square().softmax(-1) @ v


def other_axis(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (q @ k.mT).softmax(-2) @ v


def tempered(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (q @ k.mT * m.position[:, :1, :1].exp()).softmax(-1) @ v


def stable(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q @ k.mT
    scores = scores - scores.amax(dim=-1, keepdim=True)
    return (scores.exp() / scores.exp().sum(-1, keepdim=True)) @ v


def pruned(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    weights = (q @ k.mT).softmax(-1).clone()
    weights[..., 0] = 0
    return weights @ v


def overwritten(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q.detach() @ k.mT
    q.data.zero_()
    return scores.softmax(-1) @ v


def aliased(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q @ k.mT
    flat = scores.view(-1, *scores.shape[-2:])
    scores.masked_fill_(m.causal[:, :, : q.shape[2], : q.shape[2]] == 0, -math.inf)
    return flat.view(scores.shape).softmax(-1) @ v


def half_detached(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    with torch.no_grad():
        scores = q @ k.mT
    return scores.softmax(-1) @ v


def listed(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    one = q @ k.mT
    return torch.stack([one, 2 * one]).mean(0).softmax(-1) @ v


def floored(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return torch.div(q @ k.mT, 0.1, rounding_mode="trunc").softmax(-1) @ v


def with_out(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    with torch.no_grad():
        scores = q @ k.mT
        weights = torch.empty_like(scores)
        torch.softmax(scores, -1, out=weights)
    return weights @ v


def named(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return torch.matmul(F.softmax(input=torch.matmul(q, k.mT), dim=-1), other=v)


def mild(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return (q @ k.mT).masked_fill(m.causal[:, :, : q.shape[2], : q.shape[2]] == 0, -2.0).softmax(-1) @ v


def mild_in_place(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q @ k.mT
    scores.masked_fill_(m.causal[:, :, : q.shape[2], : q.shape[2]] == 0, -2.0)
    return scores.softmax(-1) @ v


def made_before_it_was_masked(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q @ k.mT
    double = scores * 2
    scores.masked_fill_(m.causal[:, :, : q.shape[2], : q.shape[2]] == 0, -math.inf)
    return (double.tanh() + scores).softmax(-1) @ v


def same_by_another_name(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q @ k.mT
    scores.to(q.dtype).contiguous().mul_(0.3)
    return scores.softmax(-1) @ v


def mask_made_of_scores(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    with torch.no_grad():
        mask = torch.zeros(*q.shape[:-1], q.shape[2], dtype=q.dtype)
        scores = q @ k.mT + mask
        mask.copy_(q @ q.mT)
    return scores.softmax(-1) @ v


def into(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = torch.zeros(q.shape[0] * HEADS, q.shape[2], q.shape[2], dtype=q.dtype)
    scores.baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT)
    return scores.view(*q.shape[:3], -1).softmax(-1) @ v


def into_out(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    with torch.no_grad():
        scores = torch.zeros(q.shape[0] * HEADS, q.shape[2], q.shape[2], dtype=q.dtype)
        torch.baddbmm(scores, q.flatten(0, 1), k.flatten(0, 1).mT, out=scores)
    return scores.view(*q.shape[:3], -1).softmax(-1) @ v


def doubled(m: Any, q: Any, k: Any, v: Any, mask: Any, double: Any) -> torch.Tensor:
    scores = q @ k.mT
    with torch.no_grad():
        double(q)
    return scores.softmax(-1) @ v


def set_twice(q: Any) -> None:
    q.data = 2 * q


#: Ways to write to a factor of scores that no method of a tensor's is.
DOUBLED = (
    lambda q: torch.ops.aten.mul_.Tensor(q, 2.0),
    lambda q: np.multiply(q.detach().numpy(), 2, out=q.detach().numpy()),
    set_twice,
)


@pytest.mark.parametrize("double", DOUBLED)
def test_a_factor_that_is_written_to_in_a_way_of_its_own(double: Any) -> None:
    original = made(partial(doubled, double=double))
    with torch.no_grad():
        expected, found = (model(**inputs(masked=False)) for model in (original, fused(original)))
    torch.testing.assert_close(found, expected)


def test_a_factor_that_is_written_to_unseen_is_an_error() -> None:
    model = fused(made(partial(doubled, double=lambda q: q.set_(2 * q))))
    with torch.no_grad(), pytest.raises(RuntimeError, match="take the fix fuse-attention back"):
        model(**inputs(masked=False))


def beside(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    scores = q @ k.mT
    mean = torch.zeros(()).add_(3)  # made of nothing that scores are made of
    weights = scores.softmax(-1) @ v
    scores.wanted = mean.mul_(2)
    return weights


def test_what_is_written_elsewhere_computes_no_scores() -> None:
    products: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.extend([func] * (func is torch.ops.aten.bmm.default))
            return func(*args, **(kwargs or {}))

    with Watching(), torch.no_grad():
        fused(made(beside))(**inputs(masked=False))
    assert products == []


def test_scores_that_are_computed_on_shapes_alone() -> None:
    model = fused(made(partial(doubled, double=lambda q: q.mul_(2)))).to("meta")
    x = inputs(masked=False)["x"].to("meta")
    assert model(x).shape == x.shape


def reduced(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return v * torch.einsum("bhqd,bhqd->", q, k) + torch.einsum("bqd,bqd->b", q[:, 0], k[:, 0]).sum()


@pytest.mark.parametrize(
    "core",
    [
        *(squared, other_axis, tempered, stable, pruned, overwritten, aliased, half_detached, listed),
        *(floored, with_out, named, mild, into, into_out, reduced),
        *(mild_in_place, made_before_it_was_masked, same_by_another_name, mask_made_of_scores),
    ],
)
def test_whatever_else_is_done_is_done_as_before(core: Core) -> None:
    original = made(core)
    assert kernel_calls(fused(original), **inputs(masked=False)) == []
    result = tilefit.verify(original, fused(original), inputs(masked=False), steps=1)
    assert result.ok, result


class Returning(nn.Module):
    """Gives its weights away, and keeps them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.weights = F.dropout((q @ k.mT).softmax(-1), self.dropout, self.training)
        return self.weights @ v, self.weights


def test_returned_weights_are_tensors() -> None:
    original, x = Returning().double(), torch.randn(2, 5, 8, dtype=torch.double)
    model = fused(original)
    out, weights = model(x)
    assert isinstance(weights, torch.Tensor)
    torch.testing.assert_close((out, weights), original(x))
    torch.testing.assert_close(model.weights.sum(-1), torch.ones(2, 5, dtype=torch.double))


class Written(Returning):
    """Gives its scores away, which it has written to."""

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        scores *= 0.5
        return scores.softmax(-1) @ v, scores


def test_scores_that_were_written_to_are_written_to_once() -> None:
    original, x = Written().double(), torch.randn(2, 5, 8, dtype=torch.double)
    torch.testing.assert_close(fused(original)(x), original(x))


class Late(Returning):
    """Gives away weights that it has used."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = F.dropout((q @ k.mT).softmax(-1), self.dropout, self.training)
        return weights @ v, weights


def test_dropped_weights_that_are_read_are_an_error_not_a_surprise() -> None:
    with pytest.raises(RuntimeError, match="fuse-attention"):
        fused(Late(0.5))(torch.randn(2, 5, 8))


class Watched(nn.Module):
    """Keeps its weights as people do who look at them later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.maps = how, None
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        assert isinstance(weights, torch.Tensor)
        assert torch.is_tensor(weights)
        if self.how.startswith("kept"):
            self.maps = weights
            if self.how == "kept, written elsewhere":
                q.detach().clone().zero_()
        elif self.how == "listed":
            self.maps = [weights]
        elif self.how == "detached":
            self.maps = weights.detach()
        elif self.how == "retained":
            weights.retain_grad()
            self.maps = weights
        elif self.how == "hooked":
            weights.register_hook(lambda gradient: gradient * 2)
        return weights @ v


@pytest.mark.parametrize(
    "how", ["kept", "kept, written elsewhere", "listed", "detached", "retained", "hooked"]
)
def test_weights_that_are_kept(how: str) -> None:
    original, x = Watched(how).double(), torch.randn(2, 5, 8, dtype=torch.double)
    model = fused(original)
    found = []
    for each in (original, model):
        out = each(x)
        (kept,) = each.maps if how == "listed" else (each.maps,)
        assert how == "hooked" or type(kept) is torch.Tensor
        gradient = None
        if how == "kept":  # what the output depends on
            (gradient,) = torch.autograd.grad(out.square().sum(), kept, retain_graph=True)
        out.square().sum().backward()
        retained = kept.grad if how == "retained" else None
        found.append((out, kept, gradient, retained, each.qkv.weight.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_hook_of_a_part_is_given_tensors(place: str) -> None:
    original, x = Attention(annotated).eval(), torch.randn(2, 9, WIDTH)
    model = fused(original)
    seen: list[list[torch.Tensor]] = []
    for each in (original, model):
        seen.append([])
        if place == "before":
            each.softmax.register_forward_pre_hook(lambda _, given: seen[-1].append(given[0]))
        else:
            each.softmax.register_forward_hook(lambda _, given, weights: seen[-1].append(weights))
        each(x)
    assert [type(tensor) for tensor in seen[1]] == [torch.Tensor]
    torch.testing.assert_close(*seen)


class Diffusing(nn.Module):
    """Attention of a diffusion model: three dimensions, and a product that scales."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.qkv = form, nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.form == "baddbmm":
            start = x.new_empty(x.shape[0], x.shape[1], x.shape[1]) if mask is None else mask
            scores = torch.baddbmm(start, q, k.mT, beta=0 if mask is None else 1, alpha=0.3)
        elif self.form == "einsum":
            scores = torch.einsum("b i d, b j d -> b i j", q, k) * 0.3
        else:
            scores = torch.einsum("... i d, ... j d -> ... i j", q * 0.3, k)
        weights = scores.softmax(-1)
        return torch.bmm(weights, v) if mask is None else torch.einsum("bij,bjd->bid", weights, v)


@pytest.mark.parametrize("form", ["baddbmm", "einsum", "dots"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_diffusion_models(form: str, masked: bool) -> None:
    original, x = Diffusing(form).double(), torch.randn(2, 5, 8, dtype=torch.double)
    arguments = (x, torch.randn(2, 5, 5, dtype=torch.double)) if masked else (x,)
    model = fused(original)
    result = tilefit.verify(original, model, arguments, steps=1)
    assert result.ok, result
    assert len(kernel_calls(model, *arguments)) == 1


class Asking(nn.Module):
    """PyTorch's own, asked for weights that only ``returns`` gives to anybody."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)
        self.returns = False

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        y, weights = self.attention(x, x, x, **options)
        return (x + y, weights) if self.returns else x + y


ASKED: list[dict[str, Any]] = [
    {},
    {"average_attn_weights": False},
    {"attn_mask": torch.ones(9, 9).triu(1).bool()},
    {"attn_mask": torch.randn(9, 9, dtype=torch.double)},
    {"key_padding_mask": torch.tensor([[False] * 9, [True] * 9])},
]


@pytest.mark.parametrize("options", ASKED)
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_nobody_reads(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    original = Asking().double().train(training)
    changed = fused(original)
    is_lost = "key_padding_mask" in options  # a row that an added mask leaves nothing
    assert len(kernel_calls(changed, inputs(masked=False)["x"], **options)) == (not is_lost)
    for returns in (False, True):
        for shape in (
            ((2, 9, WIDTH), (1, 9, WIDTH)) if "key_padding_mask" not in options else ((2, 9, WIDTH),)
        ):
            x = torch.randn(shape, dtype=torch.double)
            results = []
            for model in (original, changed):
                model.returns = returns
                own = x.clone().requires_grad_()
                made = model(own, **options)
                first, *rest = made if returns else (made,)
                model.zero_grad()
                sum((each.square().sum() for each in rest), first.square().sum()).backward()
                results.append((made, own.grad, [p.grad for p in model.parameters()]))
            assert not difference(*results)


def test_the_plan_follows_pytorchs_own_from_its_caller() -> None:
    found = plan(Asking(), torch.empty(64, 512, WIDTH))
    assert [fix.modules for fix in found.fixes] == [("",)]
    assert found.verification is not None
    assert found.verification.ok
    assert not plan(nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.empty(64, 512, WIDTH)).fixes


@pytest.mark.parametrize("form", ["filled", "added", "both", "learned"])
def test_rows_without_a_key_are_what_they_were(form: str) -> None:
    """Where there are no numbers, there are none in the gradients of query, key, value and bias."""

    class Masked(nn.Module):
        def forward(self, qkv: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = qkv.unbind(1)
            scores = q @ k.mT
            if form in ("both", "learned"):
                scores = scores + bias
            if form in ("filled", "both"):
                scores = scores.masked_fill(mask, -torch.inf)
            else:
                scores = scores + torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            return scores.softmax(-1) @ v

    mask = torch.zeros(2, 4, 5, 5, dtype=torch.bool)
    mask[0, :, 1], mask[1, ..., 3] = True, True
    found = []
    for model in (Masked(), fused(Masked())):
        torch.manual_seed(0)
        leaves = [
            torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((2, 3, 4, 5, 8), (4, 5, 5))
        ]
        out = model(*leaves, mask)
        out.sum().backward()
        found.append((out, *(leaf.grad for leaf in leaves)))
        assert form in ("added", "learned") or len(kernel_calls(model, *leaves, mask)) == (len(found) == 2)
    assert found[0][0][0, :, 1].isnan().all()
    torch.testing.assert_close(*found, equal_nan=True)


def test_keys_that_nobody_may_read() -> None:
    def attention(m: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return (q @ k.mT).masked_fill(mask, -math.inf).softmax(-1) @ v

    original, x = made(attention), inputs(masked=False)["x"]
    for mask in (torch.ones(9, dtype=torch.bool), torch.arange(9) > 5):
        found = []
        for model in (original, fused(original)):
            out = model(x, mask)
            found.append((out, *torch.autograd.grad(out.sum(), [model.q.weight, model.v.weight])))
        torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [-1e9, None])
def test_rows_that_an_added_mask_leaves_nothing_keep_their_gradients(
    dtype: torch.dtype, lowest: float | None
) -> None:
    """As of prompts padded on the left: the scores vanish beside the mask, their gradients do not."""
    keep = torch.ones(7, 7, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    keep[0, ..., :3] = False
    mask = torch.zeros(2, 1, 7, 7).masked_fill(~keep, torch.finfo(dtype).min if lowest is None else lowest)
    original = made(added).to(dtype)
    x = torch.randn(2, 7, WIDTH, dtype=dtype)
    found = []
    for model in (original, fused(original)):
        leaf = x.clone().requires_grad_()
        out = model(leaf, mask.to(dtype))
        gradients = torch.autograd.grad(out.square().sum(), [leaf, model.q.weight, model.k.weight])
        found.append([out, *gradients])
    torch.testing.assert_close(*found)
    # Without gradients, and where no row is lost, it is one kernel none the less.
    model = fused(original)
    with torch.no_grad():
        assert len(kernel_calls(model, x, mask.to(dtype))) == 1
    assert len(kernel_calls(model, x, mask[1:].repeat(2, 1, 1, 1).to(dtype))) == 1


def test_a_mask_that_layers_share_is_looked_at_once() -> None:
    mask = torch.zeros(2, 1, 7, 7)
    models, x = [fused(made(added).float()) for _ in range(3)], torch.randn(2, 7, WIDTH)
    looks: list[Any] = []

    class Watching(TorchFunctionMode):
        __module__ = "tilefit.tests"  # where others watch, layers run as they did

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            looks.extend([func] * (func is torch.Tensor.any))
            return func(*args, **(kwargs or {}))

    with Watching():
        for model in models:
            x = model(x, mask)
        assert len(looks) == 1
        mask[0, 0, 2] = -1e9
        models[0](x, mask)
        assert len(looks) == 2


# ---- as any module -----------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_checkpoints_itself_drops_the_same_twice(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = made(min_gpt)

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    original = Again()
    found = []
    for model in (original, fused(original)):
        torch.manual_seed(2)
        x = inputs(masked=False)["x"].requires_grad_()
        model(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_copies_checkpoints_and_the_compiler() -> None:
    original, args = made(min_gpt).eval(), inputs(masked=False)
    model = fused(original)
    expected = original(**args)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded(model)):
        assert len(kernel_calls(other, **args)) == 1
        torch.testing.assert_close(other(**args), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**args), expected)
    assert model.state_dict().keys() == original.state_dict().keys()
    original.load_state_dict(model.state_dict())
    model.load_state_dict(original.state_dict())


def test_a_module_is_changed_once() -> None:
    with pytest.raises(RefusedError, match="before"):
        fused(fused(made(min_gpt)))
    model, x = nn.Sequential(made(min_gpt).float()), torch.empty(2, 9, 24)
    for _ in range(2):
        found = tilefit.optimize(model, x, gpu="h200", min_gain=-1.0, verify=False, select=["fuse-attention"])
    assert not found.fixes


def test_a_causal_mask_that_is_changed_behind_its_back() -> None:
    original, args = made(min_gpt).eval(), inputs(masked=False)
    model = fused(original)
    for write in (
        lambda mask: mask.fill_(1),
        lambda mask: mask.data.tril_(),
        lambda mask: mask.data.fill_(1),
    ):
        for each in (original, model):
            write(each.get_buffer("causal"))
        torch.testing.assert_close(model(**args), original(**args))


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_undo() -> None:
    model = made(min_gpt)
    run = Run(model)
    edits = fusing(("",)).apply(run)
    assert isinstance(model, Attention)
    edits.undo()
    assert type(model) is Attention
    assert kernel_calls(model, **inputs(masked=False)) == []


# ---- the plan ----------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, core: Core) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(core) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plan(model: nn.Module, x: torch.Tensor, **options: Any) -> tilefit.Plan:
    return tilefit.optimize(model, x, gpu="h200", select=["fuse-attention"], amp="bf16", **options)


def test_the_plan_finds_proves_and_applies_it() -> None:
    model = Stack(min_gpt)
    for layer in model.layers:
        layer.causal = torch.ones(512, 512).tril().view(1, 1, 512, 512)
    found = plan(model, torch.empty(512, 512, WIDTH))
    (fix,) = found.fixes
    assert fix.modules == ("layers.0", "layers.1")
    assert found.speedup > 1.5
    assert found.after_bytes < found.before_bytes
    assert found.verification is not None
    assert found.verification.ok
    x = inputs(masked=False)["x"].float()
    assert [call["is_causal"] for call in kernel_calls(model, x)] == [True, True]
    found.edits.undo()
    assert kernel_calls(model, x) == []


def test_a_replaced_forward_is_refused() -> None:
    model = Stack(plain)
    model.layers[0].forward = model.layers[0].forward
    found = plan(model, torch.empty(512, 512, WIDTH))
    assert not found.fixes
    assert any("forward" in refused.reason for refused in found.refused)


def test_returned_weights_leave_little_gain() -> None:
    assert not plan(Returning(), torch.empty(512, 512, 8)).fixes
    # Without gradients the weights are made once, and only their product with the values is saved.
    assert plan(Returning(), torch.empty(512, 512, 8), train=False).speedup < 1.2


def test_a_compiled_model_is_left_to_the_compiler() -> None:
    assert not plan(Stack(plain), torch.empty(64, 512, WIDTH), compile=True).fixes


def test_fused_attention_is_left_alone() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    assert not plan(layer, torch.empty(64, 512, 64)).fixes
