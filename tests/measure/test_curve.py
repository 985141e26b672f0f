"""Measured times in place of predicted ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tilefit import gpus
from tilefit.cost import estimate
from tilefit.measure import timer
from tilefit.measure.curve import Measured, measure_ops
from tilefit.measure.environment import current
from tilefit.measure.pool import Pool
from tilefit.measure.store import Store
from tilefit.ops import Gemm, Streaming

H200 = gpus.get("h200")
PRODUCTS = [Gemm(8, 8, k, "fp32") for k in (8, 16, 24)]


class Ticking(timer.HostDevice):
    """A host whose clock goes on by 2 ms at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(self._tick)

    def _tick(self) -> float:
        self.now_s += 2e-3
        return self.now_s


def measured(store: Path, ops: list, watch=lambda outcomes, total: outcomes) -> Measured:  # type: ignore[no-untyped-def,type-arg]
    pool = Pool(torch.device("cpu"), 1 << 20)
    with Store(store) as opened:
        return measure_ops(ops, opened, pool, Ticking(), current(pool.device), "test", watch=watch)


def test_prices_are_the_measured_times(tmp_path: Path) -> None:
    result = measured(tmp_path / "a.db", [*PRODUCTS, *PRODUCTS])
    assert result.knows(PRODUCTS)
    for price in result.prices(PRODUCTS, H200):
        assert (price.time_s, price.provenance) == (pytest.approx(2e-3), "measured")
        assert price.low_s <= price.time_s <= price.high_s


def test_what_cannot_be_measured_is_predicted_and_named(tmp_path: Path) -> None:
    unknown = Streaming("other", 8, 8, 8)
    result = measured(tmp_path / "a.db", [*PRODUCTS, unknown])
    assert result.errors.keys() == {unknown}
    assert not result.knows([*PRODUCTS, unknown])
    assert result.reached([*PRODUCTS, unknown])
    assert result.prices([unknown], H200)[0] == estimate(unknown, H200)


def test_interrupted_it_keeps_what_is_in_the_store_and_goes_on_from_there(tmp_path: Path) -> None:
    def watch(outcomes, total):  # type: ignore[no-untyped-def]
        assert total == 3
        yield next(iter(outcomes))
        raise KeyboardInterrupt

    first = measured(tmp_path / "a.db", PRODUCTS, watch)
    assert first.interrupted
    assert first.times.keys() == {PRODUCTS[0]}
    seen = []
    again = measured(
        tmp_path / "a.db", PRODUCTS, lambda outcomes, total: (seen.append(o) or o for o in outcomes)
    )
    assert not again.interrupted
    assert again.times.keys() == {*PRODUCTS}
    assert [outcome.measurement is None for outcome in seen] == [True, False, False]
