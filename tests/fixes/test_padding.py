"""Padding and cropping, and their gradients."""

from __future__ import annotations

import pytest
import torch

from tilefit.fixes.padding import crop, pad, working_dtype

pytestmark = pytest.mark.usefixtures("any_size")


def test_pad_surrounds_with_zeros() -> None:
    x = torch.randn(3, 5)
    padded = pad(x, (4, 8))
    assert torch.equal(padded[:3, :5], x)
    assert padded.sum().item() == pytest.approx(x.sum().item())
    assert torch.equal(crop(padded, (3, 5)), x)


def test_nothing_to_do_is_no_copy() -> None:
    x = torch.randn(3, 5)
    assert pad(x, (3, 5)) is x
    assert crop(x, (3, 5)) is x


def test_pad_casts_on_the_way_and_the_gradient_is_cast_back() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = pad(x, (3, 8), torch.bfloat16)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, torch.ones(3, 5))


@pytest.mark.parametrize("function", [lambda x: pad(x, (4, 8)), lambda x: crop(x, (2, 3))])
def test_gradients_of_any_order(function) -> None:
    x = torch.randn(3, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_the_gradient_of_what_is_cropped_away_is_zero() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    crop(x, (3, 5)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cat([torch.ones(3, 5), torch.zeros(3, 3)], 1))


def test_a_crop_may_be_changed_in_place() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y = crop(x * 1, (3, 5)).relu_()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:, :5], (x[:, :5] > 0).float())


def test_functional_transforms() -> None:
    x = torch.randn(4, 3, 5)
    batched = torch.func.vmap(lambda t: crop(pad(t, (4, 8)), (3, 4)))(x)
    assert torch.equal(batched, x[:, :, :4])
    gradient = torch.func.grad(lambda t: crop(pad(t, (4, 8)), (3, 4)).square().sum())(x[0])
    assert torch.equal(gradient, torch.cat([2 * x[0, :, :4], torch.zeros(3, 1)], 1))


def test_images_stay_in_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    padded = pad(x, (2, 8, 4, 5))
    assert padded.is_contiguous(memory_format=torch.channels_last)
    assert pad(crop(padded, (2, 6, 4, 5)), (2, 8, 4, 5)).is_contiguous(memory_format=torch.channels_last)


def test_one_graph_for_the_compiler() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    compiled = torch.compile(lambda t: crop(pad(t, (4, 8)) * 2, (3, 5)), backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 5), 2.0))


def test_working_dtype_is_autocasts() -> None:
    x = torch.randn(2)
    assert working_dtype(x) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert working_dtype(x) == torch.bfloat16
        assert working_dtype(x.double()) == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert working_dtype(x) == torch.float32
