"""Work on several streams and ranks: each does its own in order, and waits for what others do; in which order
stages of a pipeline do theirs, and how layers are shared among them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import ge
from typing import NamedTuple

#: Schedules of pipelines; with several chunks 1F1B is the interleaved one.
GPIPE, ONE_F_ONE_B, ZERO_BUBBLE, ZERO_BUBBLE_V = "GPipe", "1F1B", "zero-bubble", "zero-bubble V"
#: Those that take backward passes apart.
APART = (ZERO_BUBBLE, ZERO_BUBBLE_V)


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work.

    Attributes:
        name: By which others wait for it.
        resource: What does it: one piece after the other, in the order in which they are listed.
        time_s: How long it takes.
        after: What it waits for.
    """

    name: Hashable
    resource: tuple[Hashable, ...]
    time_s: float
    after: tuple[Hashable, ...] = ()


def run(tasks: Iterable[Task]) -> dict[Hashable, float]:
    """When each task ends, in seconds, by its name.

    It begins as soon as its resource is free and what it waits for is done.

    Raises:
        ValueError: tasks wait for each other in a circle, or for one that is not there.
    """
    queues: dict[Hashable, deque[Task]] = {}
    for task in tasks:
        queues.setdefault(task.resource, deque()).append(task)
    ends: dict[Hashable, float] = {}
    free = dict.fromkeys(queues, 0.0)
    blocked: dict[Hashable, list[Hashable]] = {}
    ready = list(queues)
    while ready:
        resource = ready.pop()
        queue = queues[resource]
        while queue:
            task = queue[0]
            missing = next((name for name in task.after if name not in ends), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(resource)
                break
            queue.popleft()
            start = max(free[resource], *(ends[name] for name in task.after), 0.0)
            free[resource] = ends[task.name] = start + task.time_s
            ready += blocked.pop(task.name, ())
    stuck = [task.name for queue in queues.values() for task in queue]
    if stuck:
        raise ValueError(f"tasks wait for each other: {stuck[:4]}")
    return ends


def cut(
    costs: list[float], before_s: float, after_s: float, parts: int, most_s: float, *, fair: bool = False
) -> tuple[int, ...] | None:
    """Bounds of parts that take ``most_s`` at most, each with a layer, filled from the last on; None where
    there are none. ``fair``: none takes more than a share of what is left, rounded up."""
    bounds, left_s = [len(costs)], before_s + sum(costs) + after_s
    for left in range(parts - 1, -1, -1):  # parts that come before this one
        begin = bounds[-1]
        used_s = (after_s if left == parts - 1 else 0.0) + (0.0 if left else before_s)
        share_s = left_s / (left + 1) if fair and left else most_s
        while begin > left and (
            begin == bounds[-1] or (used_s < share_s and used_s + costs[begin - 1] <= most_s)
        ):
            begin -= 1
            used_s += costs[begin]
        left_s -= used_s
        if used_s > most_s:
            return None
        bounds.append(begin)
    return None if bounds[-1] else tuple(reversed(bounds))


def place_of(stage: int, chunk: int, stages: int, schedule: str) -> int:
    """Which part of the model a stage's chunk is, counted from the input."""
    turns = schedule == ZERO_BUBBLE_V and chunk % 2
    return chunk * stages + (stages - 1 - stage if turns else stage)


def stage_of(place: int, stages: int, schedule: str) -> int:
    """Which stage has a part of the model."""
    chunk, stage = divmod(place, stages)
    return stages - 1 - stage if schedule == ZERO_BUBBLE_V and chunk % 2 else stage


def order(
    stage: int, stages: int, chunks: int, parts: int, schedule: str = ONE_F_ONE_B
) -> Iterator[tuple[str, int, int]]:
    """What a stage computes one after the other: a pass, a micro-batch, a chunk.

    ``F`` is a forward pass, ``B`` a backward pass; where the schedule takes those apart ``B`` makes the
    gradients of activations and ``W`` those of weights. 1F1B: as many forward passes as there are stages
    behind, then one of each in turn. With several chunks (``parts`` a multiple of ``stages``) the
    micro-batches go through them in groups of ``stages``. GPipe: all forward passes go ahead. Zero-bubble:
    half as many go ahead, and a stage puts off as many ``W`` as there are stages before it.

    Sources: Narayanan and others, 2021; Qi and others, "Zero Bubble Pipeline Parallelism", 2024 (ZB-H1 and
    ZB-V); the orders are those of ``torch.distributed.pipelining``.
    """
    if schedule == ZERO_BUBBLE_V:
        yield from _there_and_back(stage, stages, parts)
        return
    total = parts * chunks
    hops = 2 if chunks > 1 and schedule == ONE_F_ONE_B else 1
    ahead = total if schedule == GPIPE else hops * (stages - stage - 1) + (chunks - 1) * stages
    ahead = min(total, ahead)
    late = stage if schedule in APART else total

    def at(number: int, kind: str) -> tuple[str, int, int]:
        if chunks == 1:
            return kind, number, 0
        group, rest = divmod(number, stages * chunks)
        chunk, part = rest // stages, group * stages + rest % stages
        return kind, part, chunk if kind == "F" else chunks - 1 - chunk

    for number in range(ahead):
        yield at(number, "F")
    for number in range(total):
        if number + ahead < total:
            yield at(number + ahead, "F")
        yield at(number, "B")
        if number >= late:
            yield at(number - late, "W")
    if schedule in APART:
        for number in range(max(0, total - late), total):
            yield at(number, "W")


def _there_and_back(stage: int, stages: int, parts: int) -> Iterator[tuple[str, int, int]]:
    """ZB-V: chunks go through the stages and back again; with few micro-batches those that are not there are
    left out."""
    most = max(2 * stages - 1, parts)
    passes = [("F", 0)] * (2 * (stages - stage) - 1)
    passes += [("F", 1), ("F", 0)] * stage + [("FBW", 1)] * (stages - stage)
    ahead = 2 * stages - stage - 1
    for done in range(most - stages):
        passes += [("F", 0)] * (ahead + done < most) + [("BW", 0), ("FBW", 1)]
    passes += [("B", 0), ("B", 1)] * stage + [("BW", 0)] * (stages - stage)
    passes += [("W", 1)] * stage + [("W", 0)] * stage
    counts: Counter[tuple[str, int]] = Counter()
    for kinds, chunk in passes:
        for kind in kinds:
            part = counts[kind, chunk]
            counts[kind, chunk] += 1
            if part < parts:
                yield kind, part, chunk


class Flight(NamedTuple):
    """What a stage has when a backward pass begins.

    Attributes:
        chunk: Whose.
        held: Of how many micro-batches it holds the activations, by chunk.
        late: How many of those wait for the gradients of their weights alone.
        summed: Whose gradients a chunk has: no micro-batch's (0), some (1), all (2).
    """

    chunk: int
    held: tuple[int, ...]
    late: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def done(self) -> tuple[bool, ...]:
        """Which chunks' passes are over."""
        return tuple(each == 2 for each in self.summed)


@lru_cache(maxsize=4096)
def in_flight(
    stage: int, stages: int, chunks: int, parts: int, schedule: str = ONE_F_ONE_B
) -> tuple[Flight, ...]:
    """The fullest moments of a stage: with the same gradients none holds less of all else than another."""
    # Many micro-batches follow each other alike.
    few = parts if schedule == GPIPE else min(parts, 4 * stages)
    last = "W" if schedule in APART else "B"
    held, late, made = [0] * chunks, [0] * chunks, [0] * chunks
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for kind, _, chunk in order(stage, stages, chunks, few, schedule):
        if kind == "B":
            summed = ((each > 0) + (each == few) for each in made)
            found.setdefault((chunk, *summed), set()).add((*held, *late))
        held[chunk] += (kind == "F") - (kind == last)
        late[chunk] += ((kind == "B") - (kind == "W")) * (schedule in APART)
        made[chunk] += kind == last
    return tuple(
        Flight(chunk, each[:chunks], each[chunks:], tuple(summed))
        for (chunk, *summed), every in found.items()
        for each in sorted(every)
        if not any(o != each and all(map(ge, o, each)) for o in every)
    )
