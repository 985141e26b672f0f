"""What a report says of a program of several ranks: their collectives, and what its streams do when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilefit import units
from tilefit.cost.estimate import Streams
from tilefit.ops import Exchange, Program, Step
from tilefit.units import counted, seconds

#: Parts of a step that a line of the timeline shows.
CELLS = 48
_LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Collectives that a line of the program calls, all alike.

    Attributes:
        name: Such as ``all-reduce``.
        phase: The pass: as of an operation.
        module: The module of the first.
        source: The line.
        ranks: GPUs that take part; ``per_machine`` of them in one machine.
        count: How often in a step.
        bytes: Of all.
        time_s: Of all, nothing else running.
        exposed_s: Of it, what the computation waits for.
    """

    name: str
    phase: str
    module: str
    source: str
    ranks: int
    per_machine: int
    count: int
    bytes: int
    time_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank that was run because another one waits for its messages.

    Attributes:
        rank: Its number.
        busy_s: GPU time of its operations.
        peak_bytes: Its memory.
    """

    rank: int
    busy_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A line of the timeline.

    Attributes:
        name: ``computation``, ``other streams``, ``communication`` or ``exposed``.
        busy: Share of each of :data:`CELLS` equal parts of the step in which something runs.
    """

    name: str
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a program and what they exchange in a step.

    Attributes:
        count: GPUs; ``per_machine`` of them in one machine.
        exchanges: Collectives, by line.
        lanes: What runs when.
        unpriced: Collectives over a link of which nothing is known; they take no time here.
        rank: The one that is told of.
        late_s: Of what is waited for, the part in which another rank is not there yet: bubbles of a pipeline.
        stages: The ranks that were run, in order; none where this one alone was.
        unmet: Messages of theirs that do not fit each other.
    """

    count: int
    per_machine: int
    exchanges: tuple[Exchanged, ...]
    lanes: tuple[Lane, ...]
    unpriced: int = 0
    rank: int = 0
    late_s: float = 0.0
    stages: tuple[Stage, ...] = ()
    unmet: int = 0

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return sum(each.exposed_s for each in self.exchanges)

    @classmethod
    def of(cls, program: Program, streams: Streams | None, ranks: Sequence[Step] = ()) -> Ranks | None:
        """What is told of a program, and of its ``ranks`` that were run; nothing of one process."""
        if program.ranks == 1 or streams is None:
            return None
        return cls(
            program.ranks,
            program.per_machine,
            tuple(_exchanged(program.exchanges, streams)),
            tuple(_lanes(streams)),
            sum(not time_s for time_s in streams.exchange_s),
            program.rank,
            sum(streams.late_s),
            tuple(_stages(program.rank, streams, ranks)),
            streams.unmet,
        )


def _exchanged(exchanges: Sequence[Exchange], streams: Streams) -> Iterator[Exchanged]:
    same: dict[tuple[object, ...], list[int]] = {}
    for index, each in enumerate(exchanges):
        key = (each.name, each.phase, each.site.source, each.ranks, each.per_machine, each.bytes)
        same.setdefault(key, []).append(index)
    for found in same.values():
        first = exchanges[found[0]]
        yield Exchanged(
            first.name,
            first.phase,
            first.site.module,
            first.site.source,
            first.ranks,
            first.per_machine,
            len(found),
            first.bytes * len(found),
            sum(streams.exchange_s[index] for index in found),
            sum(streams.exposed_s[index] for index in found),
        )


def _stages(own: int, streams: Streams, ranks: Sequence[Step]) -> Iterator[Stage]:
    peaks = {each.program.rank: each.memory.peak_bytes for each in ranks}
    order = [own, *(rank for rank in peaks if rank != own)]
    busy = dict(zip(order, streams.busy_s, strict=True)) if peaks else {}
    for rank, peak_bytes in peaks.items():
        yield Stage(rank, busy[rank], peak_bytes)


def _lanes(streams: Streams) -> Iterator[Lane]:
    whole = {
        "computation": [each for each in streams.spans if not each.exchange and not each.stream],
        "other streams": [each for each in streams.spans if not each.exchange and each.stream],
        "communication": [each for each in streams.spans if each.exchange],
    }
    for name, spans in whole.items():
        busy = [0.0] * CELLS
        for each in spans:
            first, last = (CELLS * at / streams.time_s for at in (each.start_s, each.end_s))
            for cell in range(max(0, int(first)), min(CELLS, int(last) + 1)):
                busy[cell] += max(0.0, min(last, cell + 1) - max(first, cell))
        if any(busy):
            yield Lane(name, tuple(round(min(1.0, share), 3) for share in busy))


def headline(ranks: Ranks) -> tuple[str, str]:
    """The ranks and what they exchange in a line: (label, words)."""
    machines = -(-ranks.count // ranks.per_machine)
    where = f"{counted(machines, 'machine')} of {ranks.per_machine}" if machines > 1 else "one machine"
    count = sum(each.count for each in ranks.exchanges)
    total_s = sum(each.time_s for each in ranks.exchanges)
    moved = units.size(sum(each.bytes for each in ranks.exchanges))
    said = f"{ranks.count} GPUs in {where}; {counted(count, 'collective')} a step, {moved}"
    if ranks.stages:
        said = f"{ranks.rank} of {said.replace('collective', 'message')}"
    if ranks.unpriced:
        return "Ranks", f"{said}; {ranks.unpriced} over a link that is not known take no time here"
    if ranks.stages:
        waited = (
            f"{seconds(ranks.exposed_s)} are waited, {seconds(ranks.late_s)} of it for other ranks (bubbles)"
        )
        return "Rank", f"{said}: {seconds(total_s)}; {waited}"
    waited = f"of which {seconds(ranks.exposed_s)} are waited for" if ranks.exposed_s else "all of it hidden"
    return "Ranks", f"{said}: {seconds(total_s)}, {waited}"


def everything(ranks: Ranks) -> Iterator[tuple[str, list[str]]]:
    """The line above in full: (title, lines)."""
    rows = sorted(ranks.exchanges, key=lambda each: -each.exposed_s)
    yield "Collectives, and what the computation waits for", [row(each) for each in rows]
    if ranks.stages:
        yield (
            "Ranks that were run",
            [
                f"rank {each.rank}: GPU {seconds(each.busy_s)}, {units.capacity(each.peak_bytes)}"
                for each in ranks.stages
            ],
        )
        if ranks.unmet:
            yield "Messages that do not fit", [f"{ranks.unmet} begin without who is missing"]
    width = max((len(lane.name) for lane in ranks.lanes), default=0)
    yield "What runs when", [f"{lane.name:{width}} {bar(lane)}" for lane in ranks.lanes]


def row(each: Exchanged) -> str:
    """``all-gather in the backward pass, train.py:30, layers.0: 4 of 1.5 GiB, 4.2 ms, 0.6 ms waited for``."""
    places = ", ".join(
        filter(None, (each.phase.replace("-data", "").replace("-weight", ""), each.source, each.module))
    )
    waited = f"{seconds(each.exposed_s)} waited for" if each.exposed_s > 0 else "hidden"
    over = f"over {each.ranks} GPUs" + ("" if each.ranks <= each.per_machine else " of several machines")
    moved = f"{counted(each.count, 'time')}, {units.size(each.bytes)} {over}"
    return f"{each.name}, {places}: {moved}, {seconds(each.time_s)}, {waited}"


def bar(lane: Lane) -> str:
    """A line of blocks, each as high as its part of the step is busy."""
    return "".join(_LEVELS[round(share * (len(_LEVELS) - 1))] for share in lane.busy)
