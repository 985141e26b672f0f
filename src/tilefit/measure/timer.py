"""How long does a call take on the device? Replays of many back-to-back calls, never one call alone.

The calls of one replay are captured in a CUDA graph, so that the host's launches are not timed; their
operands are different pieces of a :class:`~tilefit.measure.pool.Pool` (cold in L2) or the same ones (warm).
The device is a parameter: with a fake one the arithmetic is tested without a GPU.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tilefit.errors import TilefitError
from tilefit.measure.clocks import ClockSample, read_clocks

Call = Callable[[], object]
#: Builds a call on fresh operands.
Factory = Callable[[], Call]
#: Runs some calls back to back once and returns the elapsed seconds.
Replay = Callable[[], float]

#: Device time that one replay aims at, so that the resolution of an event (0.5 us) does not matter.
REPLAY_S = 1.5e-3
_MOST_CALLS = 200
_EXPENSIVE_S = 20e-3


class Device(Protocol):
    """What the timer needs of a device."""

    def prepare(self, factories: Sequence[Factory]) -> Replay:
        """Build the calls, run each once, and return a replay of all of them."""

    def clocks(self) -> ClockSample | None:
        """Clock, power and throttling now, if they can be read."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one call.

    Attributes:
        median_s: Median over the replays of (elapsed time / calls of a replay).
        low_s, high_s: The 20th and 80th percentile.
        replays: How many replays.
        calls: Calls of one replay.
        cold: The calls used different operands; else the same.
        clocks: SM clock and power right after the last replay; None where they cannot be read.
    """

    median_s: float
    low_s: float
    high_s: float
    replays: int
    calls: int
    cold: bool
    clocks: ClockSample | None = None

    @property
    def spread(self) -> float:
        """(high - low) / median."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s else 0.0


def measure(factory: Factory, device: Device, *, cold: bool = True, replays: int = 9) -> Timing:
    """Time one call.

    Cheap calls are repeated until a replay takes about 1.5 ms, expensive ones (over 20 ms) run alone and
    three times. Nothing is subtracted: launch gaps inside a graph (about 1 us a kernel) are part of it.

    Args:
        factory: Builds a call; called once for each call of a replay when ``cold``.
        device: Where to run.
        cold: Give every call of a replay its own operands.
        replays: Replays of a call that is not expensive.
    """
    run, calls, replays = _prepare(factory, device, cold, replays)
    return _timing([run() / calls for _ in range(replays)], calls, cold, device)


def race(
    factories: Mapping[str, Factory], device: Device, *, cold: bool = True, replays: int = 15
) -> dict[str, Timing]:
    """Time several calls in turn, so that a drift of the clock meets all of them."""
    prepared = {name: _prepare(factory, device, cold, replays) for name, factory in factories.items()}
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for turn in range(replays):
        for name, (run, calls, wanted) in prepared.items():
            if turn < wanted:
                times[name].append(run() / calls)
    return {name: _timing(times[name], calls, cold, device) for name, (_, calls, _) in prepared.items()}


def _prepare(factory: Factory, device: Device, cold: bool, replays: int) -> tuple[Replay, int, int]:
    single = device.prepare([factory])
    single()  # the first replay pays for loading the graph
    once_s = single()
    calls = max(1, min(_MOST_CALLS, round(REPLAY_S / once_s))) if once_s > 0 else _MOST_CALLS
    if once_s > _EXPENSIVE_S:
        return single, 1, 3
    if cold:
        factories = [factory] * calls
    else:
        call = factory()
        factories = [lambda: call] * calls
    run = device.prepare(factories)
    run()
    return run, calls, replays


def _timing(times: list[float], calls: int, cold: bool, device: Device) -> Timing:
    low, high = times[0], times[0]
    if len(times) > 1:
        cuts = statistics.quantiles(times, n=5, method="inclusive")
        low, high = cuts[0], cuts[-1]
    return Timing(statistics.median(times), low, high, len(times), calls, cold, device.clocks())


class CudaDevice:
    """A CUDA GPU: graph replays between two events.

    What cannot be captured in a graph runs eagerly, queued behind a kernel that keeps the GPU busy while the
    host launches it.
    """

    _FILLER_CYCLES = 20_000_000  # about 10 ms

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise TilefitError("no CUDA GPU is visible", hint="Run on a machine with a GPU.")
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def prepare(self, factories: Sequence[Factory]) -> Replay:
        """As for every device.

        Raises:
            TilefitError: the calls launch no kernel.
        """
        # All on one stream: a backward pass runs on its forward's, and a capture must not leave its own.
        with torch.cuda.stream(self._stream):
            calls = [factory() for factory in factories]
            for call in calls:
                call()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            capture = torch.cuda.graph(graph, stream=self._stream)
            try:
                with warnings.catch_warnings(record=True) as told, capture:
                    warnings.simplefilter("always")
                    for call in calls:
                        call()
            except RuntimeError:
                torch.cuda.synchronize(self.device)
                return self._timed(lambda: [call() for call in calls], filler=True)
            # PyTorch says so with a warning and in no other way.
            if any("Graph is empty" in str(warning.message) for warning in told):
                raise TilefitError("it launches no kernel, so there is nothing to be timed")

        def launch() -> object:
            graph.replay()
            return calls  # a graph reads its operands where they were: they must outlive it

        return self._timed(launch, filler=False)

    def _timed(self, run: Call, *, filler: bool) -> Replay:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def replay() -> float:
            with torch.cuda.stream(self._stream):
                if filler:
                    torch.cuda._sleep(self._FILLER_CYCLES)  # type: ignore[no-untyped-call]
                start.record()
                run()
                end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return replay

    def clocks(self) -> ClockSample | None:
        """The clocks of now; None where there are none."""
        return read_clocks(self.device)


class HostDevice:
    """The CPU by a host clock: for dry runs and tests.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def prepare(self, factories: Sequence[Factory]) -> Replay:
        """Calls that were made once, to be made again."""
        calls = [factory() for factory in factories]
        for call in calls:
            call()

        def replay() -> float:
            start = self._clock()
            for call in calls:
                call()
            return self._clock() - start

        return replay

    def clocks(self) -> ClockSample | None:
        """The clocks of now; None where there are none."""
        return None
