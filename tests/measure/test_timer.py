"""The timer's arithmetic, on a device whose clock is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tilefit.measure import timer
from tilefit.measure.clocks import ClockSample


class FakeDevice:
    """A call takes ``cost_s`` of a fake clock, more by ``drift`` with each replay."""

    def __init__(self, overhead_s: float = 0.0, drift: float = 0.0) -> None:
        self.now_s = 0.0
        self.overhead_s = overhead_s
        self.drift = drift
        self.replays = 0
        self.largest = 0

    def call(self, cost_s: float) -> Callable[[], object]:
        def run() -> None:
            self.now_s += cost_s * (1 + self.drift * self.replays)

        return run

    def prepare(self, factories: Sequence[timer.Factory]) -> timer.Replay:
        calls = [factory() for factory in factories]
        self.largest = max(self.largest, len(calls))

        def replay() -> float:
            self.replays += 1
            start_s = self.now_s
            for call in calls:
                call()
            self.now_s += self.overhead_s
            return self.now_s - start_s

        return replay

    def clocks(self) -> ClockSample | None:
        return ClockSample(0, 1980, 400.0, 50, 0)


def test_time_is_per_call() -> None:
    device = FakeDevice()
    assert timer.measure(lambda: device.call(25e-6), device).median_s == pytest.approx(25e-6)


def test_cheap_calls_are_repeated_to_about_a_millisecond_and_a_half() -> None:
    device = FakeDevice()
    timing = timer.measure(lambda: device.call(25e-6), device)
    assert timing.calls == 60
    assert timing.replays == 9


def test_repeating_hides_what_a_replay_costs_beside_its_calls() -> None:
    device = FakeDevice(overhead_s=5e-6)
    timing = timer.measure(lambda: device.call(10e-6), device)
    assert timing.median_s == pytest.approx(10e-6, rel=0.06)


def test_a_very_cheap_call_is_not_repeated_without_end() -> None:
    device = FakeDevice()
    assert timer.measure(lambda: device.call(1e-9), device).calls == 200


def test_a_call_below_the_clock_s_resolution_is_repeated_most() -> None:
    device = FakeDevice()
    assert timer.measure(lambda: device.call(0.0), device).calls == 200


def test_expensive_calls_run_alone_and_three_times() -> None:
    device = FakeDevice()
    timing = timer.measure(lambda: device.call(0.1), device)
    assert (timing.calls, timing.replays) == (1, 3)


@pytest.mark.parametrize(("cold", "built"), [(True, 61), (False, 2)])
def test_cold_calls_have_their_own_operands_and_warm_ones_share(cold: bool, built: int) -> None:
    device, instances = FakeDevice(), []

    def factory() -> Callable[[], object]:
        instances.append(None)
        return device.call(25e-6)

    timing = timer.measure(factory, device, cold=cold)
    assert timing.cold is cold
    assert len(instances) == built  # one more to find the number of calls


def test_the_spread_shows_that_times_changed() -> None:
    steady, drifting = FakeDevice(), FakeDevice(drift=0.05)
    assert timer.measure(lambda: steady.call(1e-3), steady).spread == pytest.approx(0.0, abs=1e-9)
    assert timer.measure(lambda: drifting.call(1e-3), drifting).spread > 0.1


def test_the_card_s_state_is_recorded() -> None:
    device = FakeDevice()
    clocks = timer.measure(lambda: device.call(1e-3), device).clocks
    assert clocks is not None
    assert clocks.sm_mhz == 1980


def test_the_host_device_times_with_the_clock_it_is_given() -> None:
    ticks = iter([0.0, 3.0, 10.0, 14.0])
    replay = timer.HostDevice(clock=lambda: next(ticks)).prepare([lambda: lambda: None])
    assert [replay(), replay()] == [3.0, 4.0]


def test_a_race_meets_the_same_drift_and_an_expensive_runner_stops_early() -> None:
    device = FakeDevice(drift=0.001)
    costs = {"a": 100e-6, "b": 100e-6, "slow": 50e-3}
    found = timer.race({name: (lambda c=c: device.call(c)) for name, c in costs.items()}, device, replays=9)
    assert found["a"].median_s == pytest.approx(found["b"].median_s, rel=0.01)
    assert [found[name].replays for name in costs] == [9, 9, 3]
    alone = timer.measure(lambda: device.call(100e-6), device)
    assert alone.median_s > 1.01 * found["a"].median_s, "the clock went on drifting"
