"""A quick calibration of a made-up H100 whose memory and multiprocessors are slower than its facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from math import exp
from pathlib import Path
from random import Random

import pytest

import tilefit.measure.quick as quick_module
from tilefit import gpus
from tilefit.cost import estimate
from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import Quick, read, write
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import PricedGpu, priced
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.measure.calibration import Candidate, candidates
from tilefit.measure.quick import quick
from tilefit.ops import Attention, Gemm, Op, Streaming

H100 = gpus.get("h100-pcie")
SLOW = replace(
    H100,
    memory_bandwidth_bytes_per_s=0.8 * H100.memory_bandwidth_bytes_per_s,
    boost_clock_hz=0.7 * H100.boost_clock_hz,
)


class Bench:
    """A GPU with other facts; each operation takes half a second of its clock."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.now_s = priced(gpu), 0.0

    def __call__(self, few: Sequence[Candidate]) -> list[float | None]:
        self.now_s += 0.5 * len(few)
        return [each.time_s for each in estimate_all([each.op for each in few], self.gpu)]

    def clock(self) -> float:
        return self.now_s


def test_it_finds_how_fast_the_gpu_is_and_prices_by_it(tmp_path: Path) -> None:
    bench = Bench(SLOW)
    found = quick(H100, bench, budget_s=40.0, clock=bench.clock)
    assert bench.now_s <= 40.5
    assert found.quick is not None
    assert found.quick.memory == pytest.approx(0.8, rel=0.06)
    assert found.quick.clock == pytest.approx(0.7, rel=0.06)
    assert found.about["errors"]["after"] < 0.05 < found.about["errors"]["before"]

    write(found, tmp_path / "quick.npz")
    device = priced(H100, tmp_path / "quick.npz")
    stream = Streaming("pointwise", 1 << 30, 1 << 31, 1 << 31, function="gelu", dtype="bf16")
    for op in (Gemm(8192, 8192, 8192), stream, Attention(8, 16, 2048, 128)):
        assert estimate(op, device).time_s == pytest.approx(estimate(op, SLOW).time_s, rel=0.06), op
        assert estimate(op, device).time_s > 1.1 * estimate(op, H100).time_s
    assert "quickly calibrated on" in device.calibration_title
    assert "H200" in device.calibration_title


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_one_that_ships_and_one_of_another_architecture(name: str, tmp_path: Path) -> None:
    gpu = gpus.get(name)
    path = tmp_path / "quick.npz"
    bench = Bench(gpu)
    write(replace(quick(gpu, bench, budget_s=15.0, clock=bench.clock), quick=None), path)
    exact = read(path).quick
    assert exact is not None
    assert (exact.memory, exact.clock) == pytest.approx((1.0, 1.0), rel=0.03)
    product, device = Gemm(8192, 8192, 8192), priced(gpu, path)
    assert estimate(product, device).time_s == pytest.approx(estimate(product, gpu).time_s, rel=0.08)


def test_too_few_measurements_are_an_error() -> None:
    def refuse(few: Sequence[Candidate]) -> list[float | None]:
        return [None] * len(few)

    drawn = {"gemm": iter([next(candidates()["gemm"])])}
    with pytest.raises(TilefitError, match="only 0 operations"):
        quick(H100, refuse, drawn=drawn)


def test_the_error_is_of_operations_that_were_not_fitted_to() -> None:
    """Also where no candidate is left in the end."""
    slower = cycle((1.0, 1.0, 1.5, 1.5))
    bench = Bench(H100)

    def odd_at_every_other(few: Sequence[Candidate]) -> list[float | None]:
        return [next(slower) * time_s for time_s in bench(few) if time_s]

    drawn = {"gemm": islice(candidates(seed=1)["gemm"], 60)}
    found = quick(H100, odd_at_every_other, drawn=drawn, budget_s=60.0, clock=bench.clock)
    assert found.quick == Quick(1.0, 1.0)
    assert found.about["errors"]["after"] == pytest.approx(1 / 3, abs=1e-4)


def test_errors_of_kinds_each_way_are_no_faster_memory() -> None:
    """Products priced 2 % too short, memory-bound operations as much too long, and single ones by 10 %."""
    bench, noise = Bench(H100), Random(0)

    def off(few: Sequence[Candidate]) -> list[float | None]:
        by_kind = (0.98 if isinstance(each.op, Streaming) else 1.02 for each in few)
        times_s = zip(by_kind, bench(few), strict=True)
        return [factor * exp(noise.gauss(0, 0.1)) * time_s for factor, time_s in times_s if time_s]

    found = quick(H100, off, budget_s=100.0, clock=bench.clock)
    assert found.quick == Quick(1.0, 1.0)


def test_a_first_stage_is_as_fast_as_was_found() -> None:
    """Where no donor chooses among the same kernels."""
    gpu = gpus.get("a100")
    device = priced(gpu)
    assert device.calibration is not None
    slow = type(device)(
        **{name: getattr(device, name) for name in gpu.__dataclass_fields__},
        calibration=replace(device.calibration, quick=Quick(1.0, 0.5), donor="h200"),
    )
    product: Op = Gemm(8192, 8192, 8192)
    assert estimate(product, slow).time_s == pytest.approx(2 * analytic(product, gpu).time_s, rel=0.05)


def test_the_fit_ends_in_time_on_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, error = Bench(SLOW), quick_module._error

    def slowly(gpu: PricedGpu, rows: Sequence[tuple[Op, float]]) -> float:
        bench.now_s += 1.0
        return error(gpu, rows)

    monkeypatch.setattr(quick_module, "_error", slowly)
    found = quick(H100, bench, budget_s=40.0, clock=bench.clock)
    assert bench.now_s <= 43.0
    assert found.about["errors"]["after"] < found.about["errors"]["before"]
