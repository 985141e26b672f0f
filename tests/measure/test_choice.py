"""Choosing between ways to compute a product, on the CPU with made-up ways and a made-up clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from tilefit.errors import TilefitError, UsageError
from tilefit.measure import timer
from tilefit.measure.choice import DEFAULT, FINALISTS, Choice, Way, choose, every_way
from tilefit.measure.pool import Pool
from tilefit.ops import Gemm

GEMM = Gemm(8, 16, 32, "bf16")


class Device:
    """A call advances a clock by what its way costs; how much is told by ``costs`` and may change."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.prepared = 0

    def prepare(self, factories: Sequence[timer.Factory]) -> timer.Replay:
        self.prepared += len(factories)
        calls = [factory() for factory in factories]

        def replay() -> float:
            start_s = self.now_s
            for call in calls:
                call()
            return self.now_s - start_s

        return replay

    def clocks(self) -> None:
        return None


@pytest.fixture
def pool() -> Pool:
    return Pool(torch.device("cpu"), 1 << 20)


def way(device: Device, name: str, cost_s: float | Callable[[], float], wrong: float = 0.0) -> Way:
    def build(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> timer.Call:
        def call() -> None:
            torch.mm(a, b, out=out)
            out.add_(wrong)
            device.now_s += cost_s() if callable(cost_s) else cost_s

        return call

    return Way(name, build)


def test_the_fastest_right_way_wins_and_the_regret_is_the_default_s(pool: Pool) -> None:
    device = Device()
    ways = [
        way(device, "slow", 40e-6),
        way(device, DEFAULT, 20e-6),
        way(device, "fast", 10e-6),
        way(device, "faster but wrong", 1e-6, wrong=0.5),
    ]
    choice = choose(GEMM, pool, device, ways)
    assert (choice.best, choice.regret) == ("fast", pytest.approx(2.0))
    assert not choice.is_noise
    assert choice.errors.keys() == {"faster but wrong"}
    assert "wrong result" in choice.errors["faster but wrong"]
    assert choice.rough_s == pytest.approx({DEFAULT: 20e-6, "fast": 10e-6, "slow": 40e-6})


def test_only_the_fastest_few_are_timed_again(pool: Pool) -> None:
    device = Device()
    ways = [way(device, DEFAULT, 50e-6), *(way(device, f"way {n}", n * 10e-6) for n in range(1, 9))]
    choice = choose(GEMM, pool, device, ways)
    assert choice.final.keys() == {DEFAULT, *(f"way {n}" for n in range(1, FINALISTS + 1))}
    assert choice.rough_s.keys() >= {"way 8"}


def test_luck_in_the_first_round_does_not_count(pool: Pool) -> None:
    """The second round's times are reported, and where the default wins there is no regret."""
    device, calls = Device(), []

    def lucky() -> float:
        calls.append(None)
        return 1e-6 if len(calls) < 150 else 30e-6

    choice = choose(GEMM, pool, device, [way(device, DEFAULT, 20e-6), way(device, "lucky", lucky)])
    assert choice.rough_s["lucky"] == pytest.approx(1e-6)
    assert (choice.best, choice.regret) == (DEFAULT, 1.0)


def test_a_difference_within_the_spread_is_noise() -> None:
    def timing(median_s: float) -> timer.Timing:
        return timer.Timing(median_s, 0.97 * median_s, 1.03 * median_s, 9, 10, True)

    close = Choice(GEMM, {}, {DEFAULT: timing(1.02), "other": timing(1.0)}, {})
    assert (close.best, close.is_noise) == ("other", True)
    assert not Choice(GEMM, {}, {DEFAULT: timing(1.1), "other": timing(1.0)}, {}).is_noise


def test_a_way_that_fails_is_listed_with_the_reason(pool: Pool) -> None:
    device = Device()

    def refuse(*operands: torch.Tensor) -> timer.Call:
        raise TilefitError("not for odd sizes")

    def explode(*operands: torch.Tensor) -> timer.Call:
        def call() -> None:
            raise RuntimeError("out of memory\nlong story")

        return call

    ways = [way(device, DEFAULT, 20e-6), Way("refused", refuse), Way("exploded", explode)]
    choice = choose(GEMM, pool, device, ways)
    assert choice.best == DEFAULT
    assert choice.errors == {
        "refused": "TilefitError: not for odd sizes",
        "exploded": "RuntimeError: out of memory",
    }


def test_without_the_default_there_is_nothing_to_say(pool: Pool) -> None:
    device = Device()
    ways = [way(device, DEFAULT, 20e-6, wrong=1.0), way(device, "other", 10e-6)]
    with pytest.raises(TilefitError, match="the default failed: wrong result"):
        choose(GEMM, pool, device, ways)


@pytest.mark.parametrize("gemm", [Gemm(8, 8, 8, batch=2), Gemm(16, 16, 16, "fp8")])
def test_products_without_a_choice_are_refused(pool: Pool, gemm: Gemm) -> None:
    with pytest.raises(UsageError, match="no choice for"):
        choose(gemm, pool, Device())


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_on_the_cpu_the_default_is_all_there_is_and_it_is_right(pool: Pool, layout: str, dtype: str) -> None:
    gemm = Gemm(5, 9, 33, dtype, layout)
    assert [each.name for each in every_way(gemm, pool.device)] == [DEFAULT]
    choice = choose(gemm, pool, timer.HostDevice(time.perf_counter))
    assert (choice.best, choice.regret, choice.errors) == (DEFAULT, 1.0, {})
