"""The tuner's plan and its results, without a GPU: `benchmarks/tune_persistent.py`."""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rnn.persistent.capacities import H200
from tilefit.rnn.persistent.choice import entry, key
from tilefit.rnn.persistent.variant import Variant, variants

ROOT = Path(__file__).resolve().parents[3]
NAME = "lstm/forward/16/1024/8/1"


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = __import__("tune_persistent")
    package = tmp_path / "package.json"
    package.write_text('{"variants": {"other": [1]}}', "utf-8")
    monkeypatch.setattr(module, "PACKAGE", package)
    return module


def row(variant: Variant, us: float, error: float = 0.001) -> dict[str, Any]:
    return {"problem": NAME, "variant": list(variant), "us": us, "error": error}


def result(path: Path, rows: list[dict[str, Any]], **changed: object) -> Path:
    head = {
        "gpu": "NVIDIA H200",
        "torch": "2",
        "cuda": "13",
        "date": "2026-01-01",
        "steps": 256,
        "multiprocessors": H200.multiprocessors,
        "clusters": H200.clusters,
        "variant_columns": list(Variant._fields),
    }
    path.write_text(json.dumps({**head, **changed, "rows": rows}), "utf-8")
    return path


def cuts(tuner: ModuleType) -> list[Variant]:
    problem, _ = tuner._problem_of({"problem": NAME, "variant": range(12)})
    return [v for v in variants(problem, H200) if v.rounds == 2]


def test_merged_rows_are_the_newest_of_each_variant(tuner: ModuleType, tmp_path: Path) -> None:
    plain, ahead, wrong = cuts(tuner)[:3]
    impossible = Variant(1, *plain[1:])
    old = result(tmp_path / "old.json", [row(plain, 3.0), row(ahead, 4.0), row(impossible, 1.0)])
    new = result(tmp_path / "new.json", [row(plain, 5.00001), row(wrong, 2.0, error=0.5)])
    tuner.store(tuner.merged([old, new]), argparse.Namespace(out=old, install=True))
    assert [(r["variant"], r["us"]) for r in tuner.rows_of(old)] == [
        (list(variant), us) for variant, us in ((plain, 5.0), (ahead, 4.0), (wrong, 2.0))
    ]
    installed = json.loads(tuner.PACKAGE.read_text("utf-8"))
    assert installed["variants"] == {"other": [1], NAME: list(entry(ahead))}
    assert installed["gpu"] == "NVIDIA H200"


def test_a_later_row_replaces_one_of_another_pause(tuner: ModuleType, tmp_path: Path) -> None:
    """The best pause stands for a variant; an old one may be of kernels that were faster, or of luck."""
    variant = cuts(tuner)[0]
    old = result(tmp_path / "old.json", [row(variant._replace(pause=300), 3.0)])
    new = result(tmp_path / "new.json", [row(variant._replace(pause=450), 4.0)])
    assert [each["us"] for each in tuner.merged([old, new])["rows"]] == [4.0]


def test_a_variant_is_as_fast_as_in_training_and_inference_together(tuner: ModuleType) -> None:
    one, other, early = (row(variant, us) for variant, us in zip(cuts(tuner), (3.0, 3.2, 1.0), strict=False))
    one["inference_us"], other["inference_us"] = 2.9, 2.5
    assert min([one, other, early], key=tuner.rank) is other
    assert min([one, early], key=tuner.rank) is one  # what was measured only once may be of older kernels


def test_results_of_different_kinds_are_not_merged(tuner: ModuleType, tmp_path: Path) -> None:
    files = [result(tmp_path / "a", [], gpu="NVIDIA A100"), result(tmp_path / "b", [])]
    with pytest.raises(SystemExit, match="gpu"):
        tuner.merged(files)


def asked(**changed: object) -> argparse.Namespace:
    """The options of a run."""
    default = {
        "cells": "lstm", "kernels": "forward", "directions": "1", "hidden": "1024", "batches": "8",
        "dtype": "bfloat16", "top": 3, "alike": 1, "focus": ("$^", 0),
    }  # fmt: skip
    return argparse.Namespace(**default | changed)


def test_around_the_fastest_both_ways_and_more_held_are_tried(tuner: ModuleType) -> None:
    fast = next(v for v in cuts(tuner) if v.units == 32 and v.split == 1 and v.warps == 8 and not v.ahead)
    options = asked(cells="gru,lstm", hidden="1024", batches="8,64", focus=(NAME, 20))
    plan = tuner.planned(options, H200, [row(fast, 3.0)])
    assert [len(tried) for _, tried in plan[1:]] == [3, 3, 3]
    problem, tried = plan[0]
    assert key(problem) == NAME
    assert len(set(tried)) == len(tried) > 15
    alike = [v for v in tried if tuner.cut(v) == tuner.cut(fast)]
    assert {v.ahead for v in alike} == {0, 1, 2}
    assert {v.held - fast.held for v in alike if not v.ahead} == {0, 2, 4}


def test_what_matters_comes_first(tuner: ModuleType) -> None:
    """What is in focus, then what takes several rounds."""
    options = asked(hidden="256,1024", batches="8,64", focus=("/256/8/", 3))
    found = [
        (problem.hidden, problem.batch, tried[0].rounds > 1)
        for problem, tried in tuner.planned(options, H200, [])
    ]
    assert found[0][:2] == (256, 64)
    several = [rounds for *_, rounds in found[1:]]
    assert several == sorted(several, reverse=True)
    assert True in several


def test_a_budget_measures_the_first_variants(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for the others to be compiled, and what is not compiled in time is left out."""
    plan = tuner.planned(asked(batches="8,64"), H200, [])
    (first, tried), (_, last) = plan
    slow = last[-1].constants(plan[1][0])

    def binary(kernel: str, constants: dict[str, int], capability: tuple[int, int]) -> bytes:
        if constants == slow:
            time.sleep(1.5)
        return b""

    monkeypatch.setattr(tuner, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(tuner.build, "binary", binary)
    found = list(tuner.compiled(plan, (9, 0), time.perf_counter() + 1.0))
    assert found == [(first, each) for each in tried] + [(plan[1][0], each) for each in last[:-1]]
    assert list(tuner.compiled(plan, (9, 0), time.perf_counter() - 1.0)) == []
