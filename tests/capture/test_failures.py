"""What PyTorch raises is told in the words of who asked for a capture."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from capturing import captured, products, rows
from tilefit.capture import capture
from tilefit.errors import CaptureError

OWN = torch.ones(8)  # of no step: it stays on the CPU


def _built_elsewhere(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(
        "Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision differ."
    )


def _fake(self: Any, x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return x * torch.ones(8).sum().item()


def _several_lines(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("first line. its second sentence\nand more")


def _no_text(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise KeyError


@pytest.mark.parametrize(
    ("step", "what", "hint"),
    [
        (lambda self, x: x + OWN, r"mixes tensors of different devices \(.*expected device meta", "--on-cpu"),
        (_built_elsewhere, "torchvision was not built for PyTorch", "Install the two"),
        (_fake, r"depends on values, .* \(DataDependentOutputException: ", "--on-cpu"),
        (
            lambda self, x: x[x > 0],
            r"depends on values, .* \(NotImplementedError: The register_meta",
            "--on-cpu",
        ),
        (
            lambda self, x: torch.unique(x),
            r"depends on values, .*_unique2: .* kernel registered\)$",
            "--on-cpu",
        ),
        (lambda self, x: x @ torch.ones(3, 3), "raised RuntimeError: a and b", "Check the shapes"),
        (
            _several_lines,
            r"raised RuntimeError: first line\. its second sentence$",
            "Check the shapes",
        ),
        (_no_text, "the model raised KeyError: KeyError$", "Check the shapes"),
    ],
)
def test_an_error_says_what_is_wrong_and_where(step: Callable[..., Any], what: str, hint: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(step, rows(4, 8), train=False)
    assert re.search(what, caught.value.what)
    assert hint in caught.value.hint
    assert caught.value.where.startswith("tests/capture/test_failures.py:")


def test_with_real_data_nothing_is_said_of_shapes_alone() -> None:
    def fails(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the metadata are wrong")

    with pytest.raises(CaptureError, match="the model raised RuntimeError: the metadata are wrong"):
        captured(fails, rows(4, 8), train=False, on_cpu=True)


def test_a_model_quantised_for_the_cpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    with pytest.raises(CaptureError, match=r"quantised for the CPU \(quantized::linear_dynamic\)"):
        capture(quantised, torch.empty(4, 8))


def test_a_traced_model_runs_on_real_data_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.zeros(4, 8))
    with pytest.raises(CaptureError, match="does not run on shapes alone") as caught:
        capture(traced, torch.empty(4, 8), train=False)
    assert "--on-cpu" in caught.value.hint
    assert len(products(capture(traced, torch.empty(4, 8), train=False, on_cpu=True))) == 1


def test_a_sparse_gradient_is_not_taken_for_a_wrong_input() -> None:
    with pytest.raises(CaptureError, match="has sparse tensors") as caught:
        capture(torch.nn.EmbeddingBag(8, 4, sparse=True), torch.zeros(2, 3, dtype=torch.int64))
    assert "sparse=False" in caught.value.hint


def test_samples_of_several_lengths_are_not_taken_for_a_wrong_input() -> None:
    samples = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)
    with pytest.raises(CaptureError, match="nested") as caught:
        capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), samples)
    assert "padded" in caught.value.hint
