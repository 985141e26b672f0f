"""Where host and GPU meet in a program, as its rules see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tilefit.ops import HostEvent, Step
from tilefit.ops.program import TO_GPU
from tilefit.rules.base import Change
from tilefit.units import count


def waits(event: HostEvent) -> bool:
    """Whether the host waits for what the GPU has computed."""
    return event.kind != TO_GPU and event.blocks


def free(event: HostEvent) -> HostEvent:
    """A copy to the GPU as it should be: from page-locked memory, and not waited for."""
    return replace(event, pinned=True, non_blocking=True) if event.kind == TO_GPU else event


def with_events(step: Step, events: Iterable[HostEvent]) -> Change:
    """The step with other events in its program."""
    return Change(step=replace(step, program=replace(step.program, events=tuple(events))))


def named(events: Iterable[HostEvent]) -> list[str]:
    """Each line with what it calls, how often: ``train.py:41 item``, ``train.py:52 to (3 times)``; where no
    line of the program is known, ``copy in layers.0`` or ``copy in a library``."""
    times = Counter(
        f"{event.site.source.rpartition('/')[2]} {event.name}".rstrip()
        if event.site.source
        else f"{event.name or 'a call'} in {event.site.module or 'a library'}"
        for event in events
    )
    return [what if number == 1 else f"{what} ({count(number)} times)" for what, number in times.items()]


def first_line(events: Iterable[HostEvent]) -> str:
    """The first line that is known of some events."""
    return next((event.site.source for event in events if event.site.source), "")


def listed(what: list[str], most: int = 4) -> str:
    """The first ones, and how many more there are."""
    more = f" and {len(what) - most} more" if len(what) > most else ""
    return ", ".join(what[:most]) + more
