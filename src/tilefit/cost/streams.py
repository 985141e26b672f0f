"""A step on its streams, and what it waits for: operations, collectives, and the host that asks for them.

What the program orders is gone through as it ordered it, step after step. Each stream has a clock, and so
have the host and each group of processes, whose collectives run one after the other. An operation begins when
its stream is free and the host has launched it; an event keeps the clock of its stream, and who waits for it
begins no earlier. Between two waits the host launches ahead of the GPU; at a wait it stands until the GPU has
done all that it was given, and the GPU then stands until the next launch. Operations that run at once do not
slow each other down here; a collective takes its part of the GPU from them for as long as it runs, or waits
for a rank that is not there yet.

Of a pipeline each stage is a rank that runs something else. All of them are gone through, and a message
between two of them begins when both have asked for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from tilefit.cost.estimate import Span, Streams
from tilefit.cost.launch import COLLECTIVE_S, FORWARD_S
from tilefit.cost.links import SUMMED, TAKEN, Fabric, Group, network
from tilefit.cost.waits import copy_s, launches_block
from tilefit.gpus import Gpu
from tilefit.ops import Exchange, HostEvent, Program
from tilefit.ops.program import AWAIT, RECORD, TO_STREAM, WAIT, Ordered
from tilefit.options import MOST_LINKED

#: Steps that are gone through before the one that is told: then each is as the one before.
_BEFORE = 2


#: Operations, by their index, with the times of the host and of the GPU.
_Work = list[tuple[int, float, float]]


class Timed(NamedTuple):
    """A rank's program with its times: of the host for each operation, and of the GPU."""

    program: Program
    launches_s: Sequence[float]
    times_s: Sequence[float]

    @property
    def asked_s(self) -> float:
        """Time of the stated host for what it asks for beside operations: each takes what a launch takes."""
        return COLLECTIVE_S * len(self.program.exchanges) + FORWARD_S * len(self.program.events)


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
    return fabric.time_s(exchange.function, exchange.bytes, group, sums=exchange.dtype in SUMMED)


def run(timed: Timed, gpu: Gpu, scale: float, others: Sequence[Timed] = ()) -> Streams:
    """Go through a step.

    Args:
        timed: A rank, what it orders and how long that takes.
        gpu: The GPU.
        scale: Host time over what :mod:`tilefit.cost.launch` states.
        others: Ranks that it exchanges messages with, where they are known.
    """
    ranks = (timed, *others)
    clocks = _gone_through(ranks, gpu, scale)
    beside_s = [each.beside_s() for each in clocks]
    if any(map(any, beside_s)):
        longer = (
            [own + TAKEN * more for own, more in zip(*pair, strict=True)]
            for pair in zip((each.times_s for each in ranks), beside_s, strict=True)
        )
        slower = [each._replace(times_s=times_s) for each, times_s in zip(ranks, longer, strict=True)]
        clocks = _gone_through(slower, gpu, scale)
    made = clocks[0].made
    made.unmet = clocks[0].board.unmet
    made.busy_s = tuple(sum(each.times_s) for each in ranks)
    made.slowed_s = TAKEN * sum(beside_s[0])
    return made


def _gone_through(ranks: Sequence[Timed], gpu: Gpu, scale: float) -> list[_Clocks]:
    """The clocks of all ranks behind some steps, each of which goes as far as it can in turn."""
    board = _Board([each.program for each in ranks])
    clocks = [_Clocks(each, gpu, scale, board) for each in ranks]
    running = [(each, each.steps()) for each in clocks]
    while running:
        before = sum(each.taken for each in clocks), len(running)
        running = [(clock, steps) for clock, steps in running if next(steps, "done") != "done"]
        if before == (sum(each.taken for each in clocks), len(running)):
            board.give_up()
    return clocks


def _actions(program: Program, operations: _Work) -> list[_Work | Ordered | HostEvent]:
    """Operations in a row, what streams are asked for, and where host and GPU meet, in order."""
    last, count = len(program.order), len(operations)
    asked: list[tuple[int, int, Ordered | HostEvent]] = [
        *((min(each.index, count), 2 * place + 1, each) for place, each in enumerate(program.order)),
        *((min(e.index, count), 2 * (e.after if e.after >= 0 else last), e) for e in program.events),
    ]
    actions: list[_Work | Ordered | HostEvent] = []
    first = 0
    for index, _, each in sorted(asked, key=lambda placed: placed[:2]):
        actions += [operations[first:index]] * (index > first)
        actions.append(each)
        first = max(first, index)
    return [*actions, operations[first:]]


@dataclass(eq=False)
class _Meeting:
    """An exchange: it begins when each rank that takes part, of those that are known, is there.

    Attributes:
        ranks: How many those are.
        ready_s: Of each that has asked for it, when it would begin.
        before: Exchanges that it begins after.
        later: Exchanges that begin after it.
        time_s: What it takes.
        start_s: When it begins; infinity while that is not known.
    """

    ranks: int
    ready_s: list[float] = field(default_factory=list)
    before: list[_Meeting] = field(default_factory=list)
    later: list[_Meeting] = field(default_factory=list)
    time_s: float = 0.0
    start_s: float = inf

    @property
    def end_s(self) -> float:
        """When it is over; infinity while that is not known."""
        return self.start_s + self.time_s

    def settle(self, given_up: bool = False) -> None:
        """Begin if that can be told by now, or with whoever is there if others are given up; and so on with
        those that begin after this one."""
        left = [self]
        while left:
            each = left.pop()
            ends = [before.end_s for before in each.before]
            known = len(each.ready_s) >= each.ranks and inf not in ends
            if each.start_s == inf and (known or given_up):
                each.start_s = max(*each.ready_s, *(end_s for end_s in ends if end_s < inf), 0.0)
                left += each.later
            given_up = False


class _End(NamedTuple):
    """When a stream is done: not before a time, and not before an exchange is over."""

    time_s: float = 0.0
    meeting: _Meeting | None = None
    #: Of the step, the exchange that it waits for; -1 for none.
    why: int = -1

    @property
    def known_s(self) -> float:
        """The time; infinity while that is not known."""
        return max(self.time_s, self.meeting.end_s) if self.meeting else self.time_s


class _Board:
    """Where ranks find each other: the n-th exchange of a group is the same for all that have as many."""

    def __init__(self, programs: Sequence[Program]) -> None:
        of_each = ({exchange.group for exchange in program.exchanges} for program in programs)
        self._ranks = Counter(group for groups in of_each for group in groups)
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        #: Exchanges for which a rank did not come.
        self.unmet = 0

    def meeting(self, group: str, number: int) -> _Meeting:
        """The exchange of this number."""
        return self._meetings.setdefault((group, number), _Meeting(self._ranks[group]))

    def give_up(self) -> None:
        """Nobody can go on: the first exchange that has not begun begins with those who are there."""
        self.unmet += 1
        first = next(each for each in self._meetings.values() if each.ready_s and each.end_s == inf)
        first.settle(given_up=True)


class _Clocks:
    """When each of a rank's streams is done with what it was given, and the host."""

    def __init__(self, timed: Timed, gpu: Gpu, scale: float, board: _Board) -> None:
        self.program, self.launches_s, self.times_s = timed
        self.gpu, self.scale, self.board = gpu, scale, board
        fabric = fabric_of(self.program, gpu)
        self.taken_s = tuple(exchange_s(each, fabric) or 0.0 for each in self.program.exchanges)
        self.blocking = launches_block(self.program)
        self.asked_s = sum(self.launches_s) + scale * timed.asked_s
        self.host_s = self.begin_s = 0.0
        # The host is ahead as far as the program lets it: as if the GPU had a step to do already.
        self.ends = defaultdict(_End, {0: _End(self.asked_s)})
        #: What events were recorded behind, of this step and of the one before.
        self.events: dict[int, _End] = {}
        self.earlier: dict[int, _End] = {}
        numbers = [each.number for each in self.program.order if each.kind == RECORD]
        #: The numbers of a step's events are those of the one before and so many.
        self.period = max(numbers) - min(numbers) + 1 if numbers else 0
        self.groups: dict[str, _Meeting] = {}
        self.called: Counter[str] = Counter()
        self.stream = 0
        self.made = Streams()
        #: What each stream does when is told of the last step, if there are several.
        self.told = False
        #: The exchanges of the step: of each its stream, and when that would go on without it.
        self.exchanged: dict[int, tuple[_Meeting, int, _End]] = {}
        #: Actions so far.
        self.taken = 0

    def steps(self) -> Iterator[str]:
        """Go through some steps, to the one that is told; gives way where another rank has to go on first."""
        # What goes through what the host asks for, and whether it could.
        ways: Any = {list: self._work, HostEvent: self._meet, Ordered: self._ask}
        operations = [*zip(range(len(self.times_s)), self.launches_s, self.times_s, strict=True)]
        actions = [(ways[type(each)], each) for each in _actions(self.program, operations)]
        for left in range(_BEFORE, -1, -1):
            self.told = left == 0 and bool(self.program.order)
            while (now_s := self.ends[0].known_s) == inf:
                yield "waits"
            self.begin_s, self.stream = now_s, 0
            self.earlier, self.events = self.events, {}
            self.exchanged.clear()
            self.made = Streams(exposed_s=[0.0] * len(self.taken_s), late_s=[0.0] * len(self.taken_s))
            for way, action in actions:
                while not way(action):
                    yield "waits"
                self.taken += 1
        while inf in (now_s := self.ends[0].known_s, *(each.end_s for each, *_ in self.exchanged.values())):
            yield "waits"
        self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        made = self.made
        made.time_s = max(self.asked_s, now_s - self.begin_s)
        made.exchange_s = self.taken_s
        for number, (meeting, stream, since) in self.exchanged.items():
            if not stream:  # it runs where the program computes
                self._waited(number, since.known_s, meeting.end_s)
            start_s, end_s = meeting.start_s - self.begin_s, meeting.end_s - self.begin_s
            made.spans.append(Span(stream, start_s, end_s, number, exchange=True))
        made.spans.sort(key=lambda span: span.start_s)

    def beside_s(self) -> list[float]:
        """How long each operation of the last step ran beside collectives, also beside those that wait."""
        made = [0.0] * len(self.times_s)
        links = sorted(
            (since.known_s - self.begin_s, meeting.end_s - self.begin_s)
            for meeting, stream, since in self.exchanged.values()
            if stream
        )
        own = [span for span in self.made.spans if not (span.exchange or span.stream)]  # by their beginnings
        first, told_s = 0, -inf
        for begin_s, end_s in links:
            begin_s, told_s = max(begin_s, told_s), max(end_s, told_s)  # what overlaps counts once
            while first < len(own) and own[first].end_s <= begin_s:
                first += 1
            for span in own[first : bisect_left(own, end_s, key=lambda span: span.start_s)]:
                made[span.index] += max(0.0, min(end_s, span.end_s) - max(begin_s, span.start_s))
        return made

    def _ask(self, action: Ordered) -> bool:
        if action.kind == AWAIT:
            return self._await(action)
        if action.kind == TO_STREAM:
            self.stream = action.stream
        elif action.kind == RECORD:
            self.events[action.number] = self.ends[action.stream]
        else:
            self._exchange(action)
        return True

    def _work(self, operations: _Work) -> bool:
        stream, now = self.stream, self.ends[self.stream]
        if (now_s := now.known_s) == inf:
            return False
        host_s, begin_s, spans, blocking = self.host_s, self.begin_s, self.made.spans, self.blocking
        for index, launch_s, time_s in operations:
            host_s += launch_s
            start_s = host_s if host_s > now_s else now_s
            now_s = start_s + time_s
            if blocking:
                host_s = now_s
            if self.told:
                spans.append(Span(stream, start_s - begin_s, now_s - begin_s, index))
        self.host_s, self.ends[stream] = host_s, _End(now_s, None, now.why)
        self.made.aside += [index for index, *_ in operations] if stream else ()
        return True

    def _meet(self, event: HostEvent) -> bool:
        everything = event.kind == WAIT and event.name == "synchronize" and not event.event
        waited = self._event(event.event) if event.event else self.ends[self.stream]
        until_s = max(each.known_s for each in self.ends.values()) if everything else waited.known_s
        if until_s == inf:
            return False
        self.host_s += self.scale * FORWARD_S
        if event.event:
            self.host_s = max(self.host_s, until_s)
            return True
        if not everything:
            until_s = max(self.host_s, until_s) + copy_s(event, self.gpu)
            self.ends[self.stream] = _End(until_s, why=waited.why)
        if event.blocks:
            self.host_s = max(self.host_s, until_s)
        return True

    def _event(self, number: int) -> _End:
        """What an event is behind; one of the step before has a number of that."""
        return self.events.get(number) or self.earlier.get(number + self.period) or _End()

    def _await(self, action: Ordered) -> bool:
        until, now = self._event(action.number), self.ends[action.stream]
        until_s, now_s = until.known_s, now.known_s
        if inf in (until_s, now_s):
            if not action.stream or (until_s == now_s and until.meeting is not now.meeting):
                return False
            first, second_s = (until, now_s) if until_s == inf else (now, until_s)
            known_s = second_s if second_s < inf else 0.0
            self.ends[action.stream] = first._replace(time_s=max(first.time_s, known_s))
            return True
        if until_s <= now_s:
            return True
        self.ends[action.stream] = _End(until_s, why=until.why)
        if not action.stream and until.why >= 0:
            self._waited(until.why, max(now_s, self.host_s), until_s)
        return True

    def _waited(self, number: int, since_s: float, until_s: float) -> None:
        """The computation waits for an exchange, and as a part of that for another rank to be there."""
        exposed_s = max(0.0, until_s - since_s)
        self.made.exposed_s[number] += exposed_s
        late_s = until_s - self.taken_s[number] - since_s
        if number in self.exchanged and self.exchanged[number][0].ranks > 1:
            self.made.late_s[number] += min(exposed_s, max(0.0, late_s))

    def _exchange(self, action: Ordered) -> None:
        number, stream = action.number, action.stream
        group = self.program.exchanges[number].group
        now = self.ends[stream]
        since = now._replace(time_s=max(now.time_s, self.host_s + self.scale * COLLECTIVE_S))
        meeting = self.board.meeting(group, self.called[group])
        before = {each for each in (now.meeting, self.groups.get(group)) if each is not None}
        meeting.time_s = meeting.time_s or self.taken_s[number]
        meeting.ready_s.append(since.time_s)
        meeting.before += before
        for each in before:
            each.later.append(meeting)
        meeting.settle()
        self.host_s += self.scale * COLLECTIVE_S
        self.called[group] += 1
        self.groups[group] = meeting
        self.exchanged[number] = meeting, stream, since
        self.ends[stream] = _End(since.time_s, meeting, number)
