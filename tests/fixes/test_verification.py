"""What the comparison of two models notices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilefit import verify


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


X = torch.linspace(-1, 1, 30).reshape(5, 6).sin()


def test_a_model_is_itself() -> None:
    first = model()
    result = verify(first, copy.deepcopy(first), X)
    assert result.ok
    assert result.worst == 0.0
    assert result.dtype == "float64"
    assert "agree" in str(result)


def test_the_models_stay_as_they_are() -> None:
    first = model().eval()
    before = copy.deepcopy(first.state_dict())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    verify(first, copy.deepcopy(first), X)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() == torch.float32
    assert not first.training
    assert all(parameter.grad is None for parameter in first.parameters())
    for name, value in first.state_dict().items():
        assert torch.equal(value, before[name])


class Half(nn.Module):
    """Wraps a model; a subclass changes something."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class OffInTraining(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + 1e-6 * self.training)


class NoGradient(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y.detach() + 0.5 * y - (0.5 * y).detach()


class OtherRandomNumbers(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return self.inner(x)


class OtherShape(Half):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[:, :2]


class Exchanged(Half):
    """The mean of what it gives is the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).flip(1)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (OffInTraining, "train: output"),
        (NoGradient, "eval: gradient of inner.0.weight"),
        (OtherRandomNumbers, "train: output"),
        (OtherShape, "eval: output"),
        (Exchanged, "eval: output"),
    ],
)
def test_what_differs_is_named(changed: type[Half], what: str) -> None:
    inner = model()
    result = verify(Half(inner), changed(inner), X)
    assert not result.ok
    assert any(difference.what.startswith(what) for difference in result.differences)
    assert "differ" in str(result)
    assert result.differences[0].what in str(result)


def test_a_difference_that_only_steps_show() -> None:
    class Counting(Half):
        """Off from the third forward pass on."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) * (1.001 if self.calls > 2 else 1.0)

    inner = model()
    result = verify(Half(inner), Counting(inner), X)
    assert {difference.what.split(":")[0] for difference in result.differences} == {"optimizer steps"}
    assert {difference.what.split()[-1] for difference in result.differences} == {"SGD", "AdamW"}


def test_random_numbers_may_differ_where_it_is_said() -> None:
    inner = model()
    assert verify(Half(inner), OtherRandomNumbers(inner), X, same_random_numbers=False).ok


def test_casts_to_fp32_do_not_hide_what_is_compared() -> None:
    class Upcasting(Half):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).float().softmax(-1)

    class Off(Half):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((1 + 1e-8) * self.inner(x)).float().softmax(-1)

    inner = model()
    assert not verify(Upcasting(inner), Off(inner), X).ok


def test_an_output_that_is_no_tensor() -> None:
    class Dictionary(Half):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"scores": [self.inner(x)], "count": 3, "cache": object()}

    class OtherCount(Dictionary):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {**super().forward(x), "count": 4}

    inner = model()
    assert verify(Dictionary(inner), Dictionary(inner), X).ok
    result = verify(Dictionary(inner), OtherCount(inner), X)
    assert {"eval: output['count']", "train: output['count']"} == {d.what for d in result.differences}


def test_nothing_to_compare_is_no_proof() -> None:
    class Silent(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return object()

    result = verify(Silent(), Silent(), X)
    assert not result.ok
    assert "nothing could be compared" in str(result)


def test_in_the_working_type() -> None:
    first = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight.mul_(1 + 1e-3)
    result = verify(first, second, X, amp="bf16", dtype=torch.float32)
    assert result.ok
    assert result.dtype == "bfloat16"
    assert not verify(first, second, X, dtype=torch.float32).ok


class ByHand(nn.Module):
    """Attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 768)
        self.bias = nn.Parameter(torch.randn(4, 128, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v).transpose(1, 2).flatten(2)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / 8 + self.bias).softmax(-1).to(v.dtype) @ v


class Fused(ByHand):
    """The same, rounded elsewhere."""

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.bias.to(q.dtype))


@pytest.mark.parametrize("amp", ["", "fp16"])
def test_gradients_too_small_for_fp16_are_no_difference(amp: str) -> None:
    torch.manual_seed(0)
    original = ByHand()
    fixed = copy.deepcopy(original)
    fixed.__class__ = Fused
    dtype = torch.float32 if amp else torch.float16
    # The loss is a mean over 98,304 outputs.
    result = verify(original, fixed, torch.randn(3, 128, 256), amp=amp, dtype=dtype, steps=0)
    assert result.worst < 5e-3
