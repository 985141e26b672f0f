"""How long collectives take on this machine's GPUs, and the constants of its links fitted to that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import log
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tilefit.cost.calibration import Calibration
from tilefit.cost.constants import LinkConstants, link_constants
from tilefit.cost.estimate import ESTIMATED
from tilefit.cost.links import Fabric, Group
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.measure.environment import now
from tilefit.measure.ranks import Ranks
from tilefit.ops.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, FUNCTIONS, REDUCE_SCATTER

#: From 4 KiB to 1 GiB.
SIZES = tuple(1 << power for power in range(12, 31))
#: Calls that are timed of each, so many bytes in all but for the least.
_MOST, _LEAST, _BYTES = 24, 6, 4 << 30
#: Clocks that a GPU idles for each call, so that the host has launched all of them when the first begins.
_CLOCKS = 250_000


@dataclass(frozen=True, slots=True)
class Timed:
    """A collective that was measured.

    Attributes:
        function: One of :data:`tilefit.ops.collective.FUNCTIONS`.
        ranks: GPUs that took part.
        size_bytes: Of the tensor; where each GPU has a part of it, of all parts.
        time_s: Median.
        sums: The element type is one that NVLink's switches sum up.
    """

    function: str
    ranks: int
    size_bytes: int
    time_s: float
    sums: bool = True

    def off(self, gpu: Gpu, constants: LinkConstants) -> float:
        """Logarithm of the predicted time over the measured one."""
        group = Group(self.ranks, self.ranks)
        fabric = Fabric(gpu, constants=constants)
        return log(fabric.time_s(self.function, self.size_bytes, group, sums=self.sums) / self.time_s)


def sizes_within(memory_bytes: float) -> tuple[int, ...]:
    """Sizes of which each rank can hold a few."""
    return tuple(size for size in SIZES if size <= memory_bytes / 16)


def measure(
    ranks: Ranks,
    sizes: Sequence[int] = SIZES,
    functions: Iterable[str] = FUNCTIONS,
    *,
    timeout_s: float = 60.0,
) -> Iterator[Timed]:
    """Collectives among the first 2, 4, 8, … ranks, and among all of them; in bf16.

    Raises:
        TilefitError: a collective failed, or took longer than ``timeout_s`` with all its sizes.
    """
    counts = sorted({count for power in range(1, 8) if (count := 1 << power) < ranks.count} | {ranks.count})
    for count in counts:
        for function in functions:
            found = ranks.call(_timed, function, count, tuple(sizes), ranks.device, timeout_s=timeout_s)
            for size, *times in zip(sizes, *found, strict=True):
                # The slowest: a sender is done when its message is under way.
                yield Timed(function, count, size, max(times))


def _timed(function: str, count: int, sizes: Sequence[int], device: str) -> list[float]:
    """Medians on this rank, in seconds, by size; zeros where it takes no part."""
    group = dist.group.WORLD if count == dist.get_world_size() else dist.new_group(list(range(count)))
    if dist.get_rank() >= count:
        return [0.0] * len(sizes)
    assert group is not None
    place = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)
    times = []
    for size in sizes:
        # Random, and below one: summed up again and again, it does not overflow.
        whole = torch.rand(max(size // 2, count), device=place).to(torch.bfloat16)
        call = calls(function, whole[: len(whole) // count * count], group)
        for _ in range(2):
            call()
        repeats = max(_LEAST, min(_MOST, _BYTES // size))
        times.append(_median_s(call, place, repeats, group))
    return times


def calls(function: str, whole: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """A call of a collective over a flat tensor whose elements the ranks can share."""
    count, rank = group.size(), group.rank()
    part = whole[: len(whole) // count].clone()
    if function == ALL_REDUCE:
        return lambda: dist.all_reduce(whole, group=group)
    if function == ALL_GATHER:
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if function == REDUCE_SCATTER:
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if function == ALL_TO_ALL:
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    if rank == count - 1 and count % 2:
        return lambda: None  # without a partner
    return lambda: (dist.recv if rank % 2 else dist.send)(whole, rank ^ 1, group=group)


def _median_s(
    call: Callable[[], object], place: torch.device, repeats: int, group: dist.ProcessGroup
) -> float:
    """Median time of a call, all ranks beginning together and the host ahead of the GPU."""
    meet = torch.zeros(1, device=place)
    if place.type != "cuda":
        times = []
        for _ in range(repeats):
            dist.all_reduce(meet, group=group)
            began_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - began_s)
        return statistics.median(times)
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_CLOCKS * repeats)  # type: ignore[no-untyped-call]
    dist.all_reduce(meet, group=group)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = [float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(events)]
    return statistics.median(times)


# --- what is fitted --------------------------------------------------------------------------------

#: Messages from here on count in full, smaller ones a third.
SMALLEST = 64 * 1024
#: Errors larger than this count linearly, smaller ones squared.
_OUTLIER = 0.1
#: A constant that is so many times what it was, by its logarithm, counts as an error of ``_OUTLIER``: few
#: ranks say nothing about some of them.
_PRIOR = 10.0
#: No interval is narrower: links differ from run to run.
_LEAST_SPREAD = 0.05


def fit(rows: Sequence[Timed], gpu: Gpu, start: LinkConstants) -> LinkConstants:
    """The constants with the least logarithmic errors: damped Gauss-Newton from ``start``.

    Constants that are zero stay so.
    """
    names = [each.name for each in fields(start) if each.name not in ("spread", "provenance")]
    names = [name for name in names if getattr(start, name)]
    weights = np.array([1.0 if row.size_bytes >= SMALLEST else 1 / 3 for row in rows])
    first = np.log([getattr(start, name) for name in names])

    def made(values: NDArray[np.float64]) -> LinkConstants:
        found: dict[str, Any] = dict(zip(names, map(float, np.exp(values)), strict=True))
        return replace(start, **found)

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = np.array([row.off(gpu, made(values)) for row in rows]) * weights
        errors = np.sign(errors) * np.sqrt(np.sqrt(1 + (errors / _OUTLIER) ** 2) - 1)
        return np.concatenate([errors, (values - first) / _PRIOR])

    at, off, damping = first, residuals(first), 1e-2
    for _ in range(40):
        slopes = np.stack([(residuals(at + step) - off) / 1e-4 for step in 1e-4 * np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.eye(len(at)), slopes.T @ off)
        moved = at - step.clip(-1, 1)  # a leap may end where no link is: losses of more than all
        after = residuals(moved)
        if after @ after < off @ off:
            settled = off @ off - after @ after < 1e-6 * (off @ off)
            at, off, damping = moved, after, damping / 4
            if settled:
                break
        else:
            damping *= 8
    return made(at)


def with_links(calibration: Calibration, gpu: Gpu, rows: Sequence[Timed]) -> Calibration:
    """A calibration with the constants of its GPUs' links.

    Every other size sets nothing: on these the errors are stated, and from them the interval is taken.

    Raises:
        TilefitError: the GPU's bandwidth is unknown, so that there is nothing to fit to.
    """
    if not gpu.link_bandwidth_bytes_per_s:
        raise TilefitError(f"nothing is known of what joins several {gpu.title}")
    start = link_constants(gpu)
    sizes = sorted({row.size_bytes for row in rows})[::2]
    found = fit([row for row in rows if row.size_bytes in sizes], gpu, start)
    aside = [row for row in rows if row.size_bytes not in sizes and row.size_bytes >= SMALLEST]

    def errors(constants: LinkConstants) -> list[float]:
        return sorted(abs(np.expm1(row.off(gpu, constants))) for row in aside)

    before, after = errors(start), errors(found)
    spread = max(_LEAST_SPREAD, after[int(0.8 * len(after))])
    found = replace(found, spread=round(float(spread), 3), provenance=ESTIMATED)
    facts = {
        "constants": asdict(found),
        "date": now(),
        "ranks": sorted({row.ranks for row in rows}),
        "measured": len(rows),
        "errors": {
            name: round(statistics.median(each), 4) for name, each in (("before", before), ("after", after))
        },
    }
    return replace(calibration, links=found, about=calibration.about | {"links": facts})
