"""Steps that run for real, on the CPU with a clock of our own."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from tilefit.cost.priced import priced
from tilefit.errors import TargetError
from tilefit.measure.store import Store
from tilefit.options import TargetOptions
from tilefit.sweep.axes import Axis
from tilefit.sweep.best import Trial
from tilefit.sweep.kept import Kept
from tilefit.sweep.measured import measured, search
from tilefit.sweep.meter import Meter
from tilefit.sweep.point import Point
from tilefit.sweep.run import Grid

MODEL = """\
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(32, 4)), None

def whole_step():
    return lambda: None

def pair():
    return nn.Linear(8, 4), torch.zeros(3, 8)
"""
CPU = torch.device("cpu")


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return str(file)


def points(*batches: int) -> list[Point]:
    return [
        Point(
            {"batch": b},
            "h200",
            time_s=0.01 * b**0.5,
            samples=b,
            items=b,
            memory_bytes=b,
            provenance="estimated",
        )
        for b in batches
    ]


def grid(target: str, *batches: int) -> Grid:
    options = TargetOptions(seq=4)
    return Grid(target, options, (Axis("batch", batches),), (priced("h200"),))


def test_a_step_of_any_batch(target: str) -> None:
    ticks = count()
    meter = Meter(f"{target}:build", TargetOptions(seq=4), CPU, clock=lambda: float(next(ticks)))
    # Each look at this clock is a second later, and a turn of one step looks twice.
    for batch in (2, 5):
        trial = meter(batch)
        assert trial == Trial(batch, 1.0, 1.0, 1.0, 0)
        assert trial.samples_per_s == batch


def test_of_given_inputs_no_other_batch_is_measured(target: str) -> None:
    meter = Meter(f"{target}:pair", TargetOptions(), CPU)
    assert meter(3).batch == 3
    with pytest.raises(TargetError, match="a batch of 4 cannot be measured"):
        meter(4)


def test_inputs_are_those_of_the_command(target: str) -> None:
    meter = Meter(f"{target}:pair", TargetOptions(input=("input: fp32[5,8]",)), CPU)
    assert meter(5).batch == 5


def test_running_out_of_memory_is_no_error(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(f"{target}:build", TargetOptions(seq=4), CPU)

    def full(self: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("tilefit.fixes.planning.measuring.RunningStep.__call__", full)
    assert meter(4) is None


def test_a_function_that_does_a_whole_step_is_refused(target: str) -> None:
    with pytest.raises(TargetError, match="does a whole step itself"):
        Meter(f"{target}:whole_step", TargetOptions(), CPU)


def test_points_are_measured_once(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = grid(f"{target}:build", 2, 4, 8)
    predicted = [*points(2, 4), Point({"batch": 8}, "h200", samples=8, fits=False)]
    with Store(tmp_path / "store.db") as store:
        first = list(measured(of, predicted, CPU, Kept(store, of.target, measured=["cpu"])))
        assert [(p.provenance, p.predicted_s > 0) for p in first] == [("measured", True)] * 2 + [("", False)]
        assert all(p.time_s > 0 for p in first[:2])
        monkeypatch.setattr("tilefit.sweep.measured.Meter", None)  # calling it would fail
        kept = Kept(store, of.target, measured=["cpu"])
        assert list(measured(of, predicted, CPU, kept)) == first
        assert kept.found == 2


def test_a_search_continues_from_the_store(target: str, tmp_path: Path) -> None:
    of = grid(f"{target}:build", 2, 4, 8)
    asked: list[int] = []

    def meter(batch: int) -> Trial | None:
        asked.append(batch)
        return Trial(batch, 0.02, 0.02, 0.02, batch)

    with Store(tmp_path / "store.db") as store:
        for _ in range(2):
            found, said = search(of, points(2, 4, 8), CPU, Kept(store, of.target), meter)
            assert said.startswith("Best batch: 8, found with")
            assert {p.samples: p.provenance for p in found}[8] == "measured"
    assert len(asked) == len(set(asked)) >= 1
