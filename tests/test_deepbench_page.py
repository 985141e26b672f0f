"""The page about the H200's matrix products: what it says is what was recorded, and what its words mean."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilefit.ops import Gemm

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    def module(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return module


@pytest.fixture
def page(load):
    return load("deepbench_page")


def test_committed_page_and_plot_are_those_of_the_recorded_results(page):
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    again = "The recorded results changed: run benchmarks/deepbench_page.py."
    assert page.PAGE.read_text(encoding="utf-8") == page.page(result), again
    assert page.PLOT.read_text(encoding="utf-8") == page.plot(result), again


def test_knee_is_the_first_mini_batch_near_the_best_rate(page):
    assert page.knee({1: 10.0, 2: 79.0, 4: 81.0, 8: 60.0, 16: 100.0}) == 4


def test_dip_is_a_mini_batch_that_a_larger_one_beats_clearly(page):
    times = {1: 10.0, 2: 13.0, 3: 10.5, 4: 11.0, 8: 10.0}
    assert page.dips(times) == {2: 8}  # 10.5 and 11 are not clearly more than 10


def test_regret_may_transpose_a_weight_but_no_activation(page):
    def row(layout, times):
        candidates = {name: {"us": [value, value, value]} for name, value in times.items()}
        return {"m": 64, "n": 8, "k": 32, "asked": [layout], "candidates": candidates}

    times = {"NN cublas": 2.0, "TN cublas": 4.0, "NT cublas": 6.0, "TN padded": 1.0}
    kernels = [{"m": 64, "n": 8, "k": 32, "layout": x, "kernel": "nvjet"} for x in ("NN", "TN", "NT")]
    found = {
        layout: page.regrets({"shapes": [row(layout, times)], "kernels": kernels})[0]
        for layout in ("NN", "TN", "NT")
    }
    assert (found["NN"].ratio, found["NN"].best) == (1.0, "default")
    assert (found["TN"].ratio, found["TN"].best) == (4.0, "padded copy")
    assert (found["NT"].ratio, found["NT"].best) == (1.0, "default")


@pytest.mark.parametrize(("layout", "m", "n", "k"), [("TN", 5, 9, 15), ("NN", 8, 9, 16), ("NT", 7, 8, 9)])
def test_padded_product_is_the_same_product(load, layout, m, n, k):
    questions = load("deepbench_questions")
    bench = questions.Bench(torch.device("cpu"))
    a = questions.stored(bench.randn(m, k), transposed=layout[1] == "T")
    b = questions.stored(bench.randn(k, n), transposed=layout[0] == "T")
    padded = questions.padded(bench, Gemm(m, n, k, layout=layout), a, b)
    padded.call()
    expected = a.float() @ b.float()
    assert (padded.result.float() - expected).norm() < questions.TOLERANCE * expected.norm()
    aligned = Gemm(8, 16, 24, layout=layout)
    assert questions.padded(bench, aligned, bench.randn(8, 24), bench.randn(24, 16)) is None
