"""Work on several streams and ranks: each does its own in order, and waits for what others do."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
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
