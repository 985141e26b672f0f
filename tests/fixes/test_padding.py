"""Padding and cropping, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from tilefit.fixes.changes.calls import product_dtype
from tilefit.fixes.kinds.padding.tensors import crop, widen

pytestmark = pytest.mark.usefixtures("any_size")
#: Dimensions that are padded.
PLACES = [{0: (3, 4), 1: (5, 8)}, {1: (5, 8)}]


def wide(x: torch.Tensor, places, dtype: torch.dtype | None = None, nhwc: bool = False) -> torch.Tensor:
    return widen([(x, places)], dtype or x.dtype, nhwc=nhwc)[0]


@pytest.mark.parametrize("gradients", [True, False])
def test_zeros_stand_behind_the_elements(gradients: bool) -> None:
    x = torch.randn(3, 5, requires_grad=gradients)
    for places in PLACES:
        padded = wide(x, places)
        assert padded.shape == (4 if 0 in places else 3, 8)
        assert torch.equal(padded[:3, :5], x)
        assert torch.count_nonzero(padded) == torch.count_nonzero(x)
        assert torch.equal(crop(padded[:3], 1, places[1]), x)


def test_a_cast_on_the_way_is_taken_back_in_the_gradient() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = wide(x, PLACES[1], torch.bfloat16)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, torch.ones(3, 5))


@pytest.mark.parametrize(
    "function",
    [lambda x: wide(x, PLACES[0]), lambda x: wide(x, PLACES[1]), lambda x: crop(x, 1, (3, 5))],
)
def test_gradients_of_any_order(function) -> None:
    x = torch.randn(3, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_who_needs_no_gradient_gets_none() -> None:
    x, y = torch.randn(3, 5, requires_grad=True), torch.randn(3)
    first, second = widen([(x, PLACES[0]), (y, {0: (3, 4)})], torch.float32)
    assert (first.requires_grad, second.requires_grad) == (True, False)
    (first.sum() + second.sum()).backward()
    assert y.grad is None
    z = torch.randn(3, requires_grad=True)
    first, second = widen([(x, PLACES[0]), (z, {0: (3, 4)})], torch.float32)
    first.sum().backward()
    assert z.grad is None


def test_a_crop_is_a_tensor_of_its_own() -> None:
    x = torch.randn(1, 8, requires_grad=True)
    y = crop(x * 1, 1, (5, 8))
    assert y.is_contiguous()
    assert y.untyped_storage().nbytes() == 5 * 4
    y.relu_().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cat([(x[:, :5] > 0).float(), torch.zeros(1, 3)], 1))
    with torch.no_grad():
        crop(x, 1, (5, 8)).detach_()


def test_images_stay_in_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    padded = wide(x, {1: (3, 8)}, nhwc=True)
    assert padded.is_contiguous(memory_format=torch.channels_last)
    cropped = crop(padded, 1, (3, 8))
    assert cropped.is_contiguous(memory_format=torch.channels_last)
    cropped.sum().backward()
    assert x.grad is not None
    assert x.grad.is_contiguous()


def test_one_graph_for_the_compiler() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    compiled = torch.compile(
        lambda t: crop(wide(t, PLACES[1]) * 2, 1, PLACES[1][1]), backend="aot_eager", fullgraph=True
    )
    compiled(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 5), 2.0))


def test_element_types_are_those_of_a_plain_layer() -> None:
    x, weight = torch.randn(2), Parameter(torch.randn(2))
    assert product_dtype(x) == product_dtype(x, weight, None) == torch.float32
    assert product_dtype(x, weight.bfloat16()) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product_dtype(x) == product_dtype(x, weight) == torch.bfloat16
        assert product_dtype(x.double()) == torch.float64
        assert product_dtype(x.double(), weight) is None
        with torch.autocast("cpu", enabled=False):
            assert product_dtype(x) == torch.float32


@pytest.mark.parametrize("places", PLACES)
def test_what_the_compiler_is_given_is_the_same(places, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 5)
    expected = wide(x, places)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(wide(x, places), expected)


def test_gradients_of_what_the_compiler_crops_stay_in_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(2, 8, 4, 5, requires_grad=True).to(memory_format=torch.channels_last)
    cropped = crop(x, 1, (5, 8))
    assert cropped.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(cropped.square().sum(), x)
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(gradient[:, :5], 2 * x[:, :5])
    assert not gradient[:, 5:].any()
