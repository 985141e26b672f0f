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
    assert page.PAGE.read_text(encoding="utf-8") == page.page(result, page.recorded_choice()), again
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


def _choice(size, times, source="deepbench", layout="TN", errors=None):
    m, n, k = size
    best = min(times, key=times.get)
    return {
        "source": source, "m": m, "n": n, "k": k, "layout": layout, "best": best,
        "regret": times["torch.mm"] / times[best], "noise": False,
        "us": {name: [value, value, value] for name, value in times.items()},
        "rough_us": times, "errors": errors or {},
    }  # fmt: skip


def test_section_on_the_choice_counts_what_won_and_what_was_left_out(page):
    rows = [
        _choice((4096, 16, 4096), {"torch.mm": 12.0, "Triton split-K 32x256": 8.0}),
        _choice((4095, 16, 4096), {"torch.mm": 40.0, "cuBLASLt heuristic 4": 20.0}),
        _choice((4096, 1, 4096), {"torch.mm": 10.2, "cuBLASLt heuristic 4": 10.0}, source="few rows"),
        _choice((2, 1, 768), {"torch.mm": 3.0}, source="odd", errors={"Triton 16x16x256": "wrong result"}),
        {"source": "odd", "m": 1, "n": 1, "k": 1, "layout": "TN", "failed": "out of memory"},
    ]
    facts = {"wanted": 9, "date": "2026-01-02T", "torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0"}
    text = "\n\n".join(page.choice({"provenance": facts, "choices": rows}))
    assert "4 products in bf16" in text
    assert "5 more were not reached or failed" in text
    assert "| all | 4 | 1.32 | 1.26 | 1.85 | 2.00 | 2 | 2 |" in text
    assert "| DeepBench, misaligned | 1 | 2.00 |" in text
    assert "default 2, Triton split-K 1, cuBLASLt 1" in text
    assert "| TN | 4095, 16, 4096 | cuBLASLt heuristic 4 | 40.0 | 20.0 | 2.00 |" in text
    assert "did not count: Triton 1" in text


def test_page_has_the_section_only_where_it_was_measured(page):
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    assert "## The best of cuBLAS" not in page.page(result)
    facts = {"wanted": 1, "date": "2026-01-02T", "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0"}
    rows = [_choice((4096, 16, 4096), {"torch.mm": 12.0})]
    assert "## The best of cuBLAS" in page.page(result, {"provenance": facts, "choices": rows})


def test_every_product_of_the_list_is_asked_for_smallest_first(load):
    cases = load("gemm_choice").cases()
    assert [case.source for case in cases].count("deepbench") == 160
    assert len(cases) >= 220
    assert all(case.gemm.dtype == "bf16" for case in cases)
    flop = [case.gemm.flop for case in cases]
    assert flop == sorted(flop)


def test_choices_are_recorded_until_the_time_is_up(load):
    script = load("gemm_choice")
    pool = script.Pool(torch.device("cpu"), 1 << 20)
    device = script.timer.HostDevice()
    todo = [script.Case(Gemm(4, 8, 16), "odd"), script.Case(Gemm(4096, 4096, 4096), "odd")]
    first, failed = script.measure(todo, pool, device, float("inf"))
    assert (first["m"], first["n"], first["k"], first["best"]) == (8, 4, 16, "torch.mm")
    assert first["us"]["torch.mm"][0] > 0
    assert "exceeds the pool" in failed["failed"]
    assert list(script.measure(todo, pool, device, 0.0)) == []
