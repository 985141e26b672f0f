"""Running a suite into a store, and comparing what two stores hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilefit.measure import timer
from tilefit.measure.comparison import compare, geometric_mean_ratio
from tilefit.measure.environment import Environment, current
from tilefit.measure.pool import Pool
from tilefit.measure.run import run_suite
from tilefit.measure.store import Measurement, Store
from tilefit.measure.suites import Entry
from tilefit.ops import Gemm, Streaming

SUITE = [Entry(Gemm(8, 8, k, "fp32"), "test") for k in (8, 16, 24)]


class CountingDevice(timer.HostDevice):
    """A host whose clock advances a millisecond at each look, and which counts what it prepared."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.prepared = 0
        super().__init__(self._tick)

    def _tick(self) -> float:
        self.now_s += 1e-3
        return self.now_s

    def prepare(self, factories):  # type: ignore[no-untyped-def]
        self.prepared += 1
        return super().prepare(factories)


@pytest.fixture
def pool() -> Pool:
    return Pool(torch.device("cpu"), 1 << 20)


def run(entries: list[Entry], store: Store, pool: Pool, device: timer.Device):  # type: ignore[no-untyped-def]
    return run_suite(entries, store, pool, device, current(pool.device))


def test_a_restart_measures_only_what_is_missing(tmp_path: Path, pool: Pool) -> None:
    with Store(tmp_path / "a.db") as store:
        outcomes = run(SUITE, store, pool, CountingDevice())
        next(outcomes)
        next(outcomes)
        outcomes.close()  # interrupted
        assert len(store) == 2
    device = CountingDevice()
    with Store(tmp_path / "a.db") as store:
        again = list(run(SUITE, store, pool, device))
        assert [outcome.measurement is None for outcome in again] == [True, True, False]
        assert len(store) == 3
        assert device.prepared == 2, "once to find the number of calls, once to measure"


def test_one_bad_shape_stops_nothing(tmp_path: Path, pool: Pool) -> None:
    entries = [
        Entry(Gemm(8, 8, 8, "fp8", "NN"), "test"),  # PyTorch has no such product
        Entry(Gemm(4096, 4096, 8, "fp32"), "test"),  # larger than the pool
        Entry(Streaming("other", 8, 8, 8), "test"),
        *SUITE[:1],
    ]
    with Store(tmp_path / "a.db") as store:
        outcomes = list(run(entries, store, pool, CountingDevice()))
        assert [bool(outcome.error) for outcome in outcomes] == [True, True, True, False]
        assert "layout TN" in outcomes[0].error
        assert len(store) == 1


def test_provenance_is_stored(tmp_path: Path, pool: Pool) -> None:
    with Store(tmp_path / "a.db") as store:
        list(run(SUITE[:1], store, pool, CountingDevice()))
        (measurement,) = store
    assert measurement.environment.gpu == "cpu"
    assert measurement.environment.torch == torch.__version__
    assert measurement.date.endswith("Z")
    assert measurement.source == "test"
    assert measurement.cold


HERE = Environment("cpu", "", "2", "", "")


def at(op: Gemm, median_s: float, date: str = "2026-01-01", spread: float = 0.02) -> Measurement:
    low_s, high_s = median_s * (1 - spread / 2), median_s * (1 + spread / 2)
    return Measurement(op, HERE, median_s, low_s, high_s, 9, 1, cold=True, date=date)


def test_only_common_operations_are_compared_largest_change_first() -> None:
    a, b, c, d = (Gemm(m, 8, 8) for m in (1, 2, 3, 4))
    pairs = compare([at(a, 1.0), at(b, 1.0), at(c, 1.0)], [at(b, 1.01), at(c, 0.5), at(d, 1.0)])
    assert [(pair.op, pair.ratio) for pair in pairs] == [(c, 0.5), (b, 1.01)]
    assert [pair.differs for pair in pairs] == [True, False], "1 % is within a spread of 2 %"
    assert geometric_mean_ratio(pairs) == pytest.approx((0.5 * 1.01) ** 0.5)


def test_the_latest_measurement_counts_and_warm_is_not_compared_with_cold() -> None:
    a = Gemm(1, 8, 8)
    old, new = at(a, 1.0), replace(at(a, 3.0, date="2026-02-01"), environment=replace(HERE, torch="3"))
    (pair,) = compare([at(a, 1.0)], [new, old])
    assert pair.ratio == 3.0
    assert compare([at(a, 1.0)], [replace(old, cold=False)]) == []
