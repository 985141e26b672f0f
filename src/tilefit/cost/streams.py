"""A step on several streams, and what it waits for: operations, collectives, and the host that asks for them.

What the program orders is gone through as it ordered it, step after step. Each stream has a clock, and so
have the host and each group of processes, whose collectives run one after the other. An operation begins when
its stream is free and the host has launched it; an event keeps the clock of its stream, and who waits for it
begins no earlier. What runs at once does not slow each other down here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilefit.cost.launch import COLLECTIVE_S, FORWARD_S
from tilefit.cost.links import Fabric, Group, network
from tilefit.cost.waits import copy_s, launches_block
from tilefit.gpus import Gpu
from tilefit.ops import Exchange, HostEvent, Program
from tilefit.ops.program import AWAIT, RECORD, TO_STREAM, WAIT, Ordered
from tilefit.options import MOST_LINKED

#: Steps that are gone through before the one that is told: then each is as the one before.
_BEFORE = 2
_SUMMED = ("fp16", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Span:
    """What a stream does for a time.

    Attributes:
        stream: Its number.
        start_s, end_s: From the beginning of the step.
        index: Of the operation, or of the exchange.
        exchange: It is a collective.
    """

    stream: int
    start_s: float
    end_s: float
    index: int
    exchange: bool = False


@dataclass(slots=True)
class Streams:
    """A step as its streams run it.

    Attributes:
        time_s: Of one step among others.
        exchange_s: Of each collective.
        exposed_s: Of it, what the stream that computes waits for, and nothing hides; of each collective.
        aside: Operations that run on other streams than that, by their index.
        spans: What each stream does when.
    """

    time_s: float = 0.0
    exchange_s: tuple[float, ...] = ()
    exposed_s: list[float] = field(default_factory=list)
    aside: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def fabric_of(program: Program, gpu: Gpu) -> Fabric:
    """What joins the GPUs of a program."""
    several = program.per_machine < program.ranks
    net = network(program.network) if several and program.network else None
    return Fabric(gpu, min(program.per_machine, MOST_LINKED), net)


def exchange_s(exchange: Exchange, fabric: Fabric) -> float | None:
    """Time of a collective, nothing else running; None where nothing is known of what joins the GPUs."""
    group = Group(exchange.ranks, exchange.per_machine)
    if not fabric.reaches(group):
        return None
    sums = exchange.dtype in _SUMMED
    return fabric.time_s(exchange.function, exchange.bytes, group, sums=sums)


def run(
    program: Program, launches_s: Sequence[float], times_s: Sequence[float], gpu: Gpu, scale: float
) -> Streams:
    """Go through a step.

    Args:
        program: What it orders.
        launches_s: Host time of each operation, in order.
        times_s: GPU time of each operation.
        gpu: The GPU.
        scale: Host time over what :mod:`tilefit.cost.launch` states.
    """
    fabric = fabric_of(program, gpu)
    taken_s = tuple(exchange_s(each, fabric) or 0.0 for each in program.exchanges)
    actions = list(_actions(program, len(times_s)))
    host_s = sum(launches_s) + scale * (
        COLLECTIVE_S * len(program.exchanges) + FORWARD_S * len(program.events)
    )
    clocks = _Clocks(program, launches_s, times_s, taken_s, gpu, scale)
    # The host is ahead as far as the program lets it: as if the GPU had a step to do already.
    clocks.ends[0] = host_s
    begin_s = 0.0
    for _ in range(_BEFORE + 1):
        begin_s = clocks.begin()
        for action in actions:
            clocks.take(action)
    made = clocks.made
    made.time_s = max(host_s, clocks.ends[0] - begin_s)
    made.exchange_s = taken_s
    made.spans = [
        replace(each, start_s=each.start_s - begin_s, end_s=each.end_s - begin_s) for each in made.spans
    ]
    return made


def _actions(program: Program, count: int) -> Iterator[int | Ordered | HostEvent]:
    """Operations by their index, what streams are asked for, and where host and GPU meet, in order."""
    order: dict[int, list[Any]] = {}
    asked: tuple[Ordered | HostEvent, ...] = (*program.order, *program.events)
    for each in asked:
        order.setdefault(min(each.index, count), []).append(each)
    for index in range(count + 1):
        yield from order.get(index, ())
        if index < count:
            yield index


class _Clocks:
    """When each is done with what it was given."""

    def __init__(
        self,
        program: Program,
        launches_s: Sequence[float],
        times_s: Sequence[float],
        taken_s: Sequence[float],
        gpu: Gpu,
        scale: float,
    ) -> None:
        self.program, self.launches_s, self.times_s, self.taken_s = program, launches_s, times_s, taken_s
        self.gpu, self.scale = gpu, scale
        self.blocking = launches_block(program)
        self.host_s = 0.0
        self.ends: dict[int, float] = {0: 0.0}
        #: The collective that a stream waited for last, or ran.
        self.why: dict[int, int] = {}
        self.events: dict[int, tuple[float, int]] = {}
        self.groups: dict[str, float] = {}
        self.stream = 0
        self.made = Streams()

    def begin(self) -> float:
        """A step begins; returns when."""
        self.stream = 0
        self.events.clear()
        self.made = Streams(exposed_s=[0.0] * len(self.program.exchanges))
        return self.ends[0]

    def take(self, action: int | Ordered | HostEvent) -> None:
        """What the host asks for next."""
        if isinstance(action, int):
            self.host_s += self.launches_s[action]
            self._work(self.times_s[action], action)
        elif isinstance(action, HostEvent):
            self._meet(action)
        elif action.kind == TO_STREAM:
            self.stream = action.stream
        elif action.kind == RECORD:
            stream = action.stream
            self.events[action.number] = self.ends.get(stream, 0.0), self.why.get(stream, -1)
        elif action.kind == AWAIT:
            self._await(action)
        else:
            self._exchange(action)

    def _work(self, time_s: float, index: int) -> None:
        start_s = max(self.host_s, self.ends.get(self.stream, 0.0))
        self.ends[self.stream] = start_s + time_s
        if self.blocking:
            self.host_s = start_s + time_s
        self.made.spans.append(Span(self.stream, start_s, start_s + time_s, index))
        if self.stream:
            self.made.aside.append(index)

    def _meet(self, event: HostEvent) -> None:
        self.host_s += self.scale * FORWARD_S
        start_s = max(self.host_s, self.ends.get(self.stream, 0.0))
        self.ends[self.stream] = start_s + copy_s(event, self.gpu)
        if event.blocks:
            everything = event.kind == WAIT and event.name == "synchronize"
            self.host_s = max(self.ends.values()) if everything else self.ends[self.stream]

    def _await(self, action: Ordered) -> None:
        until_s, why = self.events.get(action.number, (0.0, -1))
        now_s = self.ends.get(action.stream, 0.0)
        if until_s <= now_s:
            return
        self.ends[action.stream] = until_s
        self.why[action.stream] = why
        if not action.stream and why >= 0:
            self.made.exposed_s[why] += max(0.0, until_s - max(now_s, self.host_s))

    def _exchange(self, action: Ordered) -> None:
        number, stream = action.number, action.stream
        group = self.program.exchanges[number].group
        self.host_s += self.scale * COLLECTIVE_S
        start_s = max(self.host_s, self.ends.get(stream, 0.0), self.groups.get(group, 0.0))
        end_s = start_s + self.taken_s[number]
        if not stream:  # it runs where the program computes
            waited_s = max(self.host_s, self.ends[0])
            self.made.exposed_s[number] += end_s - waited_s
        self.ends[stream] = self.groups[group] = end_s
        self.why[stream] = number
        self.made.spans.append(Span(stream, start_s, end_s, number, exchange=True))
