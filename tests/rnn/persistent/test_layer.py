"""What the persistent kernels refuse, and why."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from rnn.persistent.capacities import H200
from tilefit.rnn.call import Call
from tilefit.rnn.cells import CELLS
from tilefit.rnn.persistent import layer
from tilefit.rnn.persistent.choice import chosen
from tilefit.rnn.persistent.variant import Capacity, Problem, Variant

CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


def refused(
    cell: str, dtype: torch.dtype, *sizes: int, device: torch.device = CUDA, **call: Any
) -> str | None:
    """Why a call of 10 steps is refused; ``sizes`` are hidden units, mini-batch and directions."""
    hidden, batch, directions = sizes
    base = Call(
        cell, dtype, device, False, 1, hidden, batch, 10, 1, directions, 0, False, False, False, dtype, False
    )
    return layer.refusal(base._replace(**call))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, as far as a refusal looks at it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(layer, "capacity", lambda index: H200)
    monkeypatch.setattr(layer, "allows_tf32", lambda dtype, device: True)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("device", [CUDA, torch.device("cuda")], ids=str)
def test_what_fits_runs(cell: str, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert refused(cell, dtype, 33, 5, 2, device=device, training=True) is None


@pytest.mark.usefixtures("hopper")
def test_what_does_not_fit_is_refused() -> None:
    assert refused("lstm", BF16, 1024, 64, 1, training=True) is None
    reason = refused("lstm", BF16, 4096, 64, 1)
    assert reason is not None
    assert "hidden size 4096" in reason
    assert "do not fit" in reason


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("ragged", "call"), [("lengths", "ragged"), ("resets", "reset")])
def test_what_fits_only_without_lengths_and_resets_is_refused_with_them(
    ragged: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        layer, "chosen", lambda problem, capacity: None if getattr(problem, ragged) else object()
    )
    assert refused("lstm", BF16, 64, 8, 1) is None
    reason = str(refused("lstm", BF16, 64, 8, 1, **{call: True}))
    assert "(forward, with lengths or resets)" in reason


@pytest.mark.usefixtures("hopper")
def test_more_rows_than_32_bits_can_number_are_refused() -> None:
    assert refused("lstm", BF16, 64, 8, 2, steps=2**27 - 2) is None
    assert "134217727 steps" in str(refused("lstm", BF16, 64, 8, 2, steps=2**27 - 1))


@pytest.mark.usefixtures("hopper")
def test_training_asks_for_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "chosen", lambda problem, capacity: None if problem.backward else object())
    assert refused("lstm", BF16, 64, 8, 1) is None
    assert "(backward)" in str(refused("lstm", BF16, 64, 8, 1, training=True))


def test_other_types() -> None:
    assert "in float64" in str(refused("lstm", torch.float64, 64, 8, 1))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("hidden", "batch", "allowed", "strict"),
    [(64, 8, True, True), (256, 8, True, False), (256, 3, True, True), (256, 8, False, True)],
)
def test_fp32_is_exact_where_tf32_is_not_allowed_or_cudnn_is_exact(
    hidden: int, batch: int, allowed: bool, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Problem] = []

    def recorded(problem: Problem, capacity: Capacity) -> Variant | None:
        asked.append(problem)
        return chosen(problem, capacity)

    monkeypatch.setattr(layer, "allows_tf32", lambda dtype, device: allowed)
    monkeypatch.setattr(layer, "chosen", recorded)
    assert refused("lstm", torch.float32, hidden, batch, 1, training=True) is None
    assert [problem.strict for problem in asked] == [strict, strict]


@pytest.mark.usefixtures("hopper")
def test_old_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert "compute capability 7.5" in str(refused("lstm", BF16, 64, 8, 1))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("absent", ["cuda", "cuda.bindings"])
def test_without_cuda_bindings(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cuda.bindings")
    monkeypatch.setitem(sys.modules, absent, None)
    assert "pip install cuda-bindings" in str(refused("lstm", BF16, 64, 8, 1))
