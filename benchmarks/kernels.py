"""What the measurements behind the cost model see of kernels besides how long each ran: what its name says,
and at which clock.

The ``nvjet`` grammar is inferred from names of GEMMs of known shape profiled on an H200 (CUDA 13.0); the
CUTLASS and ``xmma`` names follow their generators.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tilefit.measure.clocks import ClockSample, nvml, sample
from tilefit.measure.kernels import family, short_name
from tilefit.measure.sessions import Launch


class HostSession:
    """A :class:`~tilefit.measure.sessions.Session` without a GPU, for dry runs and tests: host time, one
    nameless launch per call."""

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


@dataclass
class ClockLog:
    """Readings taken by a thread while a measurement runs; stays empty where NVML is missing."""

    index: int = 0
    period_s: float = 0.05
    samples: list[ClockSample] = field(default_factory=list)

    def start(self) -> None:
        """Take readings until the process ends."""
        found = nvml(self.index)
        if found is None:
            return
        pynvml, handle = found

        def run() -> None:
            while True:
                self.samples.append(sample(pynvml, handle))
                time.sleep(self.period_s)

        threading.Thread(target=run, daemon=True).start()

    def sm_mhz(self, at_ns: int) -> int | None:
        """The SM clock at a time since the epoch; None without readings."""
        samples = self.samples
        if not samples:
            return None
        index = bisect_left(samples, at_ns, key=lambda sample: sample.at_ns)
        return samples[min(index, len(samples) - 1)].sm_mhz


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as its name describes it.

    Attributes:
        name: The short name (see :func:`short_name`).
        family: One of :data:`tilefit.measure.kernels.FAMILIES`; empty where the name says nothing.
        tile: Output tile as (rows of C, columns of C) of the row-major product; None where not named.
        tile_k: Depth of one pipeline stage; 0 where not named.
        stages: Pipeline stages; 0 where not named.
        cluster: Thread blocks of a cluster as (rows, columns) of the row-major product.
        split_k: The contraction is split over thread blocks.
        layout: The letters cuBLAS sees (first the column-major A, PyTorch's second operand); may be empty.
        align: Elements of one access that the kernel was built for; 0 where not named.
    """

    name: str
    family: str = ""
    tile: tuple[int, int] | None = None
    tile_k: int = 0
    stages: int = 0
    cluster: tuple[int, int] = (1, 1)
    split_k: bool = False
    layout: str = ""
    align: int = 0


_NVJET = re.compile(
    r"nvjet(?:_(?P<arch>sm\d+))?_(?P<types>[a-z0-9]+)_(?P<a>\d+)x(?P<b>\d+)_(?P<k>\d+)x(?P<stages>\d+)"
    r"(?:_(?P<cluster_a>\d+)x(?P<cluster_b>\d+))?(?P<rest>\w*)"
)
_CUTLASS = re.compile(
    r"cutlass(?:3x)?_\w*?_(?P<a>\d+)x(?P<b>\d+)(?:_(?P<k>\d+)x(?P<stages>\d+)|x(?P<k3>\d+))?"
    r"_(?:\w+_)?(?P<layout>[nt]{2,3}|nhwc|nchw)(?:_align(?P<align>\d+))?"
)
_XMMA = re.compile(
    r"sm\d+_xmma_\w*?_(?P<layout>[nt]{2})_\w*?tilesize(?P<a>\d+)x(?P<b>\d+)x(?P<k>\d+)(?:_stage(?P<stages>\d+))?"
)
_NAMED = re.compile(
    r"(?:gemm|fprop|dgrad|wgrad)\w*?_(?P<a>\d{2,3})x(?P<b>\d{2,3})\w*?_(?P<layout>[nt]{2})(?:_|$)"
)
# What runs beside the kernel that does the work: clearing a counter, adding up the parts of a split.
_HELPERS = ("splitkreduce", "memset", "memcpy", "reduce_1block", "scal_kernel")


def main_kernel(launches: Sequence[tuple[str, float]]) -> str:
    """The name of the kernel that does a call's work: the longest that is no helper.

    Args:
        launches: Name and duration of each kernel of the call; not empty.
    """
    workers = [launch for launch in launches if not any(word in launch[0].lower() for word in _HELPERS)]
    return max(workers or launches, key=lambda launch: launch[1])[0]


def parse(name: str) -> Kernel:
    """Read a kernel's name, demangled or short."""
    short = short_name(name)
    low = name.lower()
    kind, split_k = family(name), "splitk" in low or "split_k" in low
    if kind in ("flash", "cudnn-attention"):
        return Kernel(name=short, family=kind)
    nvjet = _NVJET.search(short)
    if nvjet:
        letters = re.search(r"_([NT]{2})[NT](?:_|$)", nvjet["rest"])
        return Kernel(
            name=short,
            family=kind,
            # cuBLAS m x n, and cuBLAS m is the column of the row-major product.
            tile=(int(nvjet["b"]), int(nvjet["a"])),
            tile_k=int(nvjet["k"]),
            stages=int(nvjet["stages"]),
            cluster=(int(nvjet["cluster_b"] or 1), int(nvjet["cluster_a"] or 1)),
            split_k="splitK" in nvjet["rest"],
            layout=letters[1] if letters else "",
        )
    found = _CUTLASS.search(short) or _NAMED.search(short)
    if found:
        groups = found.groupdict()
        layout = groups["layout"].upper()
        return Kernel(
            name=short,
            family=kind,
            tile=(int(groups["b"]), int(groups["a"])),
            tile_k=int(groups.get("k") or groups.get("k3") or 0),
            stages=int(groups.get("stages") or 0),
            split_k=split_k,
            layout=layout[:2] if set(layout) <= {"N", "T"} else "",
            align=int(groups.get("align") or 0),
        )
    xmma = _XMMA.search(short)
    if xmma:
        return Kernel(
            name=short,
            family=kind,
            # These name rows first: on an H200 a product of many rows and 16 columns runs 128x32.
            tile=(int(xmma["a"]), int(xmma["b"])),
            tile_k=int(xmma["k"]),
            stages=int(xmma["stages"] or 0),
            split_k=split_k,
            layout=xmma["layout"].upper(),
        )
    return Kernel(name=short, family=kind, split_k=split_k)
