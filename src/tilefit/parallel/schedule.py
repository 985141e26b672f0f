"""Work on several streams and ranks: each does its own in order, and waits for what others do; in which order
stages of a pipeline do theirs, and how layers are shared among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass


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


def order(
    stage: int, stages: int, chunks: int, parts: int, most_ahead: int | None = None
) -> Iterator[tuple[str, int, int]]:
    """What a stage computes one after the other: forward or backward (``F``, ``B``), micro-batch, chunk.

    1F1B: as many forward passes as there are stages behind, then one of each in turn. With several chunks
    (``parts`` a multiple of ``stages``) the micro-batches go through them in groups of ``stages``. GPipe: as
    many as ``most_ahead``, all of them, go ahead.
    """
    total = parts * chunks
    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    ahead = min(total, ahead if most_ahead is None else most_ahead)

    def place(number: int, *, backward: bool) -> tuple[str, int, int]:
        if chunks == 1:
            return ("B" if backward else "F"), number, 0
        group, rest = divmod(number, stages * chunks)
        chunk = rest // stages
        part = group * stages + rest % stages
        return ("B", part, chunks - 1 - chunk) if backward else ("F", part, chunk)

    for number in range(ahead):
        yield place(number, backward=False)
    for number in range(total):
        if number + ahead < total:
            yield place(number + ahead, backward=False)
        yield place(number, backward=True)


def in_flight(stage: int, stages: int, chunks: int, parts: int) -> float:
    """Micro-batches of which a stage holds activations at once; of several chunks, a part of one each."""
    if chunks == 1:
        return min(stages - stage, parts)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, parts * chunks) / chunks
