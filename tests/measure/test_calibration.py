"""Calibration of a made-up GPU: its times follow the model with constants nobody has told it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tilefit import gpus
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.profiles import GENERAL, Constants
from tilefit.errors import TilefitError
from tilefit.measure import calibration
from tilefit.measure.calibration import Calibration, calibrate
from tilefit.ops import Gemm

GPU = gpus.get("h200")
HIDDEN = replace(GENERAL, math_efficiency=0.55, memory_efficiency=0.65, kernel_clocks=2500, spread=0.4)


class Bench:
    """Measures by the hidden constants; each product takes a second of a made-up clock."""

    def __init__(self, refuse: Callable[[Gemm], bool] = lambda product: False) -> None:
        self.now_s = 0.0
        self.products: list[Gemm] = []
        self.refuse = refuse

    def __call__(self, product: Gemm) -> float:
        self.now_s += 1.0
        if self.refuse(product):
            raise TilefitError("out of memory")
        self.products.append(product)
        return estimate_gemm(product, GPU, HIDDEN).time_s

    def clock(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def result() -> tuple[Calibration, Bench]:
    bench = Bench()
    return calibrate(GPU, bench, budget_s=100, clock=bench.clock), bench


def test_it_finds_the_constants_of_the_gpu(result: tuple[Calibration, Bench]) -> None:
    found, _ = result
    assert found.error_before > 0.15
    assert found.error_after < 0.05
    assert found.constants.math_efficiency == pytest.approx(HIDDEN.math_efficiency, rel=0.1)
    assert found.constants.provenance == "estimated"


def test_the_spread_is_that_of_the_error(result: tuple[Calibration, Bench]) -> None:
    found, _ = result
    assert 0 < found.constants.spread < 0.1


def test_it_keeps_to_its_budget(result: tuple[Calibration, Bench]) -> None:
    found, bench = result
    assert 80 <= bench.now_s <= 90
    assert found.measured == len(bench.products)


def test_products_that_cannot_run_are_left_out() -> None:
    bench = Bench(refuse=lambda product: product.m > 10_000)
    found = calibrate(GPU, bench, budget_s=60, clock=bench.clock)
    assert found.measured == len(bench.products) < 51
    assert found.error_after < found.error_before


def test_too_little_is_an_error() -> None:
    bench = Bench(refuse=lambda product: product.k > 64)
    with pytest.raises(TilefitError, match="could be measured"):
        calibrate(GPU, bench, budget_s=20, clock=bench.clock)


def test_it_says_how_far_it_is() -> None:
    bench, told = Bench(), []
    calibrate(
        GPU, bench, budget_s=50, clock=bench.clock, on_progress=lambda n, share: told.append((n, share))
    )
    assert [n for n, _ in told] == list(range(1, len(told) + 1))
    assert told[0][1] < 0.05
    assert told[-1][1] > 0.8


def test_disputed_products_are_ranked() -> None:
    sure, open_ = Gemm(8, 16384, 16384), Gemm(8192, 8192, 8192)
    committee = [replace(GENERAL, math_efficiency=share) for share in (0.4, 0.8)]
    assert calibration._most_disputed([sure, open_], GPU, committee) == [open_, sure]


PROFILE = Calibration("h200", "2026-01-02T03:04:05Z", "torch 2.11", GENERAL, 90, 0.2, 0.05)


def test_a_profile_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "h200.json"
    calibration.save(PROFILE, path)
    assert calibration.load(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["h200.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace('"gpu"', '"cpu"'), "damaged"),
        (lambda text: json.dumps([text]), "damaged"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "another version"),
    ],
)
def test_a_damaged_profile_is_reported_and_kept(
    tmp_path: Path, damage: Callable[[str], str], message: str
) -> None:
    path = tmp_path / "h200.json"
    calibration.save(PROFILE, path)
    broken = damage(path.read_text())
    path.write_text(broken)
    with pytest.raises(TilefitError, match=message) as error:
        calibration.load(path)
    assert "tilefit calibrate" in str(error.value)
    assert path.read_text() == broken


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(TilefitError, match="cannot be read"):
        calibration.load(tmp_path / "none.json")


def test_constants_are_all_written(tmp_path: Path) -> None:
    calibration.save(PROFILE, tmp_path / "p.json")
    written = json.loads((tmp_path / "p.json").read_text())["constants"]
    assert Constants(**written) == GENERAL
