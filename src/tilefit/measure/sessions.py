"""How long the kernels of calls run on the GPU, and nothing else: no gap between them, no host time.

A session runs calls one after the other on one stream and reads from CUPTI, through ``torch.profiler``, which
kernels each of them launched and how long each ran. Two tiny marker kernels around every call tell its
kernels from its neighbours', whatever it launches. Where CUPTI is out of reach (another profiler holds it, or
a virtual machine forbids it), CUDA events around a call take its place, and the gaps between a call's own
kernels, of about 1 us each, count as its time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, Self

import torch
from torch._C._autograd import DeviceType

from tilefit.errors import TilefitError

#: Calls of each factory that count, after one that pays for loading code. The next may still find a cold
#: instruction cache, which their median ignores.
_CALLS = 5
_MARKER = "spin_kernel"  # what torch.cuda._sleep launches
#: The GPU waits this long (0.2 ms at 2 GHz) before a call that events time, so that the host is ahead of it.
_AHEAD_CYCLES = 400_000


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel (or memory operation) that ran on the GPU: its name, start and duration in ns."""

    name: str
    start_ns: int
    duration_ns: int


class Session(Protocol):
    """Runs operations; after the ``with`` block, ``results()[i]`` holds the launches of the i-th call."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...

    def call(self, operation: Callable[[], object]) -> None:
        """Run an operation, whose launches are one entry of :meth:`results`."""

    def results(self) -> list[list[Launch]]:
        """The launches of each call."""


class CudaSession:
    """A :class:`Session` on a CUDA device, through ``torch.profiler``."""

    def __init__(self) -> None:
        # Sessions follow each other: what CUPTI sets up stays, and each says nothing on stderr.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        self._calls = 0
        self._launches: list[Launch] = []

    def __enter__(self) -> Self:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def call(self, operation: Callable[[], object]) -> None:
        """Run an operation, whose launches are one entry of :meth:`results`."""
        self._calls += 1
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        try:
            operation()
        finally:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        torch.cuda.synchronize()
        self._profile.__exit__(*raised)  # type: ignore[no-untyped-call]
        # The raw records: the profiler's own table of events takes far longer to build than to measure.
        raw = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        self._launches = sorted(
            (
                Launch(event.name(), event.start_ns(), event.duration_ns())
                for event in raw
                if event.device_type() == DeviceType.CUDA
            ),
            key=lambda launch: launch.start_ns,
        )
        del self._profile

    def results(self) -> list[list[Launch]]:
        """The launches of each call.

        Raises:
            TilefitError: the profiler lost records, so that calls cannot be told apart.
        """
        return split_at_markers(self._launches, self._calls)


class EventSession:
    """A :class:`Session` by CUDA events: one launch a call, from its first kernel to its last."""

    def __enter__(self) -> Self:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        return self

    def call(self, operation: Callable[[], object]) -> None:
        """Run an operation, whose time is one entry of :meth:`results`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._events.append((start, end))
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        try:
            operation()
        finally:
            end.record()

    def __exit__(self, *raised: object) -> None:
        timed = list(self._events)
        for _ in range(_CALLS):
            self.call(lambda: None)
        torch.cuda.synchronize()
        empty_ms = median(start.elapsed_time(end) for start, end in self._events[len(timed) :])
        took_ns = [round(1e6 * max(0.0, start.elapsed_time(end) - empty_ms)) for start, end in timed]
        self._launches = [[Launch("call", 0, each_ns)] for each_ns in took_ns]

    def results(self) -> list[list[Launch]]:
        """The one launch of each call."""
        return self._launches


def session_kind() -> type[CudaSession | EventSession]:
    """What times kernels here: CUPTI, or events where it does not see a kernel that runs."""
    probe = CudaSession()
    try:
        with probe:
            probe.call(lambda: None)
        probe.results()
    except (RuntimeError, TilefitError):
        return EventSession
    return CudaSession


def split_at_markers(launches: list[Launch], calls: int) -> list[list[Launch]]:
    """The launches between the first and second marker, the third and fourth, and so on.

    Raises:
        TilefitError: there are not two markers for each call.
    """
    groups: list[list[Launch]] = [[]]
    for launch in launches:
        if _MARKER in launch.name:
            groups.append([])
        else:
            groups[-1].append(launch)
    if len(groups) != 2 * calls + 1:
        raise TilefitError(
            f"the profiler returned {len(groups) - 1} of {2 * calls} markers",
            hint="Kernels are timed by CUPTI: end other profilers, and look whether this machine allows it.",
        )
    return groups[1::2]


def busy_s(launches: Sequence[Launch]) -> float:
    """Time during which at least one kernel ran, of a call whose kernels may overlap; ordered by start."""
    busy_ns = end_ns = 0
    for launch in launches:
        stop_ns = launch.start_ns + launch.duration_ns
        busy_ns += max(0, stop_ns - max(launch.start_ns, end_ns))
        end_ns = max(end_ns, stop_ns)
    return 1e-9 * busy_ns


def kernel_times(
    factories: Sequence[Callable[[], Callable[[], object]]], session: Session
) -> list[float | None]:
    """Seconds that the kernels of a call run, of each factory's: the median of a few calls, each built anew.

    Args:
        factories: Build a call on operands of its own, which are then not in the L2 cache.
        session: A new one, which this enters.

    Returns:
        None where a call cannot be built or run, as it is not supported or does not fit, or runs no kernel.

    Raises:
        TilefitError: the profiler lost records.
    """
    counts: list[int] = []
    failed: list[bool] = []
    with session as running:
        for factory in factories:
            count = 0
            try:
                for _ in range(1 + _CALLS):
                    call = factory()
                    count += 1
                    running.call(call)
            except (RuntimeError, ValueError, TilefitError):
                failed.append(True)
            else:
                failed.append(False)
            counts.append(count)
    results = iter(session.results())
    times_s: list[float | None] = []
    for count, unfit in zip(counts, failed, strict=True):
        each_s = [busy_s(next(results)) for _ in range(count)][1:]
        times_s.append(None if unfit or not all(each_s) else median(each_s))
    return times_s
