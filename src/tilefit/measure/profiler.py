"""Kernel durations and names from the profiler, for hundreds of operations a second.

A session runs operations one after the other on one stream and reads from CUPTI which kernels each of
them launched and how long each kernel ran on the GPU: no launch gaps, no host time. Two tiny marker
kernels around every operation tell its kernels from its neighbours', whatever it launches.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch._C._autograd import DeviceType

from tilefit.errors import TilefitError


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel (or memory operation) that ran on the GPU: its name, start and duration in ns."""

    name: str
    start_ns: int
    duration_ns: int


class Session(Protocol):
    """Runs operations; after the ``with`` block, ``results()[i]`` holds the launches of the i-th call."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def call(self, operation: Callable[[], object]) -> None:
        """Run an operation, whose launches are one entry of :meth:`results`."""

    def results(self) -> list[list[Launch]]:
        """The launches of each call."""


_MARKER = "spin_kernel"  # what torch.cuda._sleep launches


class CudaSession:
    """A :class:`Session` on a CUDA device, through ``torch.profiler``."""

    def __init__(self) -> None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize()
        self._profile.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
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
        raise TilefitError(f"the profiler returned {len(groups) - 1} of {2 * calls} markers")
    return groups[1::2]


class HostSession:
    """A :class:`Session` without a GPU: host time, one nameless launch per call. For dry runs and tests."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._results: list[list[Launch]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def call(self, operation: Callable[[], object]) -> None:
        """Run an operation, whose launches are one entry of :meth:`results`."""
        start = self._clock()
        self._results.append([])
        operation()
        self._results[-1] = [Launch("host", start, self._clock() - start)]

    def results(self) -> list[list[Launch]]:
        """The launches of each call."""
        return self._results
