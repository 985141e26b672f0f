"""Work on several streams and ranks: each does its own in order, and waits for what others do."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


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


@dataclass(slots=True)
class Schedule:
    """When the work is done.

    Attributes:
        ends: By name of the task, in seconds.
        busy: Time that each resource works.
    """

    ends: dict[Hashable, float] = field(default_factory=dict)
    busy: dict[Hashable, float] = field(default_factory=dict)

    @property
    def time_s(self) -> float:
        """When everything is done."""
        return max(self.ends.values(), default=0.0)


def run(tasks: Iterable[Task]) -> Schedule:
    """Do the work: each task as soon as its resource is free and what it waits for is done.

    Raises:
        ValueError: tasks wait for each other in a circle, or for one that is not there.
    """
    queues: dict[Hashable, deque[Task]] = {}
    for task in tasks:
        queues.setdefault(task.resource, deque()).append(task)
    made = Schedule(busy=dict.fromkeys(queues, 0.0))
    free = dict.fromkeys(queues, 0.0)
    blocked: dict[Hashable, list[Hashable]] = {}
    ready = list(queues)
    while ready:
        resource = ready.pop()
        queue = queues[resource]
        while queue:
            task = queue[0]
            missing = next((name for name in task.after if name not in made.ends), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(resource)
                break
            queue.popleft()
            start = max(free[resource], *(made.ends[name] for name in task.after), 0.0)
            free[resource] = made.ends[task.name] = start + task.time_s
            made.busy[resource] += task.time_s
            ready += blocked.pop(task.name, ())
    stuck = [task.name for queue in queues.values() for task in queue]
    if stuck:
        raise ValueError(f"tasks wait for each other: {stuck[:4]}")
    return made
