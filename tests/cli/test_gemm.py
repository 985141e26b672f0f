"""``tilefit gemm``: other ways to run a product, predicted and measured."""

from __future__ import annotations

import pytest
import torch

from tilefit.cli import local_gpu
from tilefit.measure import choice, timer
from tilefit.measure.environment import Environment
from tilefit.ops import Gemm


def test_padding_and_transposing_are_priced_with_their_copies(tilefit) -> None:
    ran = tilefit("gemm", "16384", "50257", "768", "--gpu", "h200")
    assert ran.code == 0
    lines = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert lines["padded to n = 50264"].rstrip().endswith("<0.1")
    assert {"A transposed (TT)", "B transposed (NN)"} <= lines.keys()
    assert "saves, 80 %" in lines["other ways"]


def test_what_may_never_pay_says_never(tilefit) -> None:
    out = tilefit("gemm", "128", "4096", "4096", "--gpu", "h200").out
    (line,) = (line for line in out.splitlines() if line.startswith("B transposed"))
    assert "to never)" in line
    assert "padded" not in out


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_it_fits_the_terminal(tilefit, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = tilefit("gemm", "16", "4095", "4095", "--gpu", "h200").out
    assert max(map(len, out.splitlines())) <= columns


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for an H200."""

    here = local_gpu.LocalGpu(
        timer.HostDevice(), torch.device("cpu"), Environment("NVIDIA H200", "1", "2", "13", "9")
    )
    monkeypatch.setattr(local_gpu, "local_gpu", lambda: here)


@pytest.mark.usefixtures("measuring")
def test_the_ways_are_measured_for_this_product(tilefit) -> None:
    out = " ".join(tilefit("gemm", "4", "24", "16", "--layout", "NN", "--measure").out.split())
    assert "gemm 4x24x16 NN bf16 on NVIDIA H200" in out
    assert "Measured on NVIDIA H200, operands cold in L2" in out
    assert "PyTorch's default is as fast as anything tried" in out


@pytest.mark.usefixtures("measuring")
def test_the_regret_names_the_best_way_and_failures_are_listed(
    tilefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timing(median_s: float) -> timer.Timing:
        return timer.Timing(median_s, 0.99 * median_s, 1.01 * median_s, 9, 10, True)

    made = choice.Choice(
        Gemm(16, 4096, 4096),
        {choice.DEFAULT: 12e-6, "Triton split-K 32x256": 8e-6, "cuBLASLt heuristic 7": 30e-6},
        {choice.DEFAULT: timing(12e-6), "Triton split-K 32x256": timing(8e-6)},
        {"cuBLASLt heuristic 3": "wrong result: relative distance 0.5"},
    )
    monkeypatch.setattr(choice, "choose", lambda *arguments: made)
    out = tilefit("gemm", "16", "4096", "4096", "--measure").out
    assert "Regret of PyTorch's default: 1.50x the time of Triton split-K 32x256." in out
    order = [out.index(name) for name in ("Triton split-K", "torch.mm ", "heuristic 7", "heuristic 3")]
    assert order == sorted(order)
    assert "wrong result" in out


@pytest.mark.usefixtures("measuring")
def test_products_that_cannot_be_compared_are_refused(tilefit) -> None:
    ran = tilefit("gemm", "16", "16", "16", "--dtype", "fp8", "--measure")
    assert ran.code == 2
    assert "no choice for 16x16x16 fp8" in ran.err
