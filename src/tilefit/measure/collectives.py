"""How long collectives take on this machine's GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
    """

    function: str
    ranks: int
    size_bytes: int
    time_s: float


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
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(_CLOCKS * repeats)
    dist.all_reduce(meet, group=group)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)) / 1e3
