"""Which modules to compute again in the backward pass, so that a step fits into a budget of memory.

Activation checkpointing drops what a module keeps for its backward pass and computes it again when that
begins. What that does to the memory follows from the step's timeline: when a module is checkpointed, what it
made and nobody outside reads is freed when its forward pass ends, and made again, with its temporary results,
where its backward pass begins; what it reads is kept until then.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilefit.cost.estimate import Estimate
from tilefit.ops import FORWARD, OPTIMIZER, Step
from tilefit.ops.timeline import BUFFERS, CASTS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS

#: Host time that one checkpointed call adds: saving the random state, hooks. A choice; of the order that
#: PyTorch's own Python needs.
CALL_S = 1e-4
#: Share of it that counts when modules are compared: the host is mostly ahead of the GPU.
_COUNTED = 0.2
#: Classes of modules that are never called.
_CONTAINERS = frozenset(("ModuleList", "ModuleDict", "ParameterList", "ParameterDict"))
#: Classes of modules that keep statistics of their batches.
NORMALIZATION = re.compile("BatchNorm|InstanceNorm")
_HELD = frozenset((PARAMETERS, BUFFERS, INPUTS, GRADIENTS, OPTIMIZER_STATE))

#: Bytes that are added at a place between events: index of the event, order there, bytes.
_Delta = tuple[float, int, int]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Modules that are computed again.

    Attributes:
        modules: Their paths, in the order in which they run.
        peak_bytes: The most memory that is then alive.
        extra_s: GPU time of what is computed again.
    """

    modules: tuple[str, ...]
    peak_bytes: int
    extra_s: float


@dataclass(slots=True)
class _Part:
    """A module that can be computed again.

    Attributes:
        first, last: Its operations in the forward pass.
        extra_s: Time of those that are run again.
        deltas: What it changes in the timeline.
        reads: Blocks made before it that it keeps, and until which event.
    """

    path: str
    first: int
    last: int
    extra_s: float = 0.0
    deltas: list[_Delta] = field(default_factory=list)
    reads: dict[int, float] = field(default_factory=dict)


class Recompute:
    """The search over the modules of a training step.

    Args:
        step: With its timeline.
        times: What each of its operations takes.
        allowed: Whether a module may be computed again.
    """

    def __init__(
        self, step: Step, times: Sequence[Estimate], allowed: Callable[[str], bool] = lambda path: True
    ) -> None:
        self._step, self._times = step, times
        self._timeline = step.memory.timeline
        self._events = [(float(i), 0, size) for i, (_, _, size) in enumerate(self._timeline.changes())]
        # By block: the events that make and free it.
        self._lives: dict[int, list[int]] = defaultdict(list)
        # By operation: the first event from it on.
        self._from: list[int] = []
        for index, (number, op) in enumerate(self._timeline.events):
            self._lives[number].append(index)
            self._from += [index] * (op + 1 - len(self._from))
        self._from += [len(self._events)] * (len(step.ops) + 2 - len(self._from))
        self._paths = [_around(entry.site.module) for entry in step.ops]
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._makers: dict[int, int] = {}
        for index, entry in enumerate(step.ops):
            for ref in entry.outputs:
                self._makers.setdefault(ref.id, index)
            for ref in entry.inputs:
                self._readers[ref.id].append(index)
        self._backward = next((i for i, e in enumerate(step.ops) if e.phase != FORWARD), len(step.ops))
        self.parts = {part.path: part for part in self._found(allowed)}

    # ---- what can be computed again ------------------------------------------------------------

    def _found(self, allowed: Callable[[str], bool]) -> Iterator[_Part]:
        spans: dict[str, list[int]] = defaultdict(list)
        starts: dict[str, int] = {}
        for index, entry in enumerate(self._step.ops):
            for path in self._paths[index]:
                if entry.phase == FORWARD and index < self._backward:
                    spans[path].append(index)
                elif entry.phase != OPTIMIZER:
                    starts.setdefault(path, index)
        for path, ops in spans.items():
            contiguous = ops[-1] - ops[0] + 1 == len(ops)
            called = self._step.modules.get(path) not in _CONTAINERS
            if path in starts and contiguous and called and self._is_one_call(ops) and allowed(path):
                part = self._part(path, ops, starts[path])
                if any(delta < 0 for *_, delta in part.deltas):
                    yield part

    def _is_one_call(self, ops: Sequence[int]) -> bool:
        """No parameter is read twice at the same place, and no buffer is written but statistics."""
        seen: set[tuple[str, str, str]] = set()
        for entry in map(self._step.ops.__getitem__, ops):
            key = entry.site.module, entry.name, entry.parameter
            writes = any(self._owner(ref.id) == BUFFERS for ref in entry.outputs)
            if entry.parameter and entry.op.multiplies and key in seen:
                return False
            # Statistics of a normalisation are put aside while it runs again.
            if writes and not NORMALIZATION.search(self._step.modules.get(entry.site.module, "")):
                return False
            seen.add(key)
        return True

    def _owner(self, number: int) -> str:
        block = self._timeline.blocks.get(number)
        return block.owner if block else INPUTS

    def _part(self, path: str, ops: Sequence[int], start: int) -> _Part:
        part = _Part(path, ops[0], ops[-1])
        inside = frozenset(ops)
        made = [n for n, maker in self._makers.items() if maker in inside and n in self._lives]
        at_end, at_backward = self._from[part.last + 1] - 0.5, self._from[self._backward] - 0.5
        again = self._from[start] - 0.5
        dropped = {n for n in made if self._is_dropped(n, path, start)}
        # Run again is what makes something that the module's backward pass reads, and what is before it.
        needed = max((self._makers[n] for n in made if self._is_saved(n, path)), default=-1)
        for number in made:
            size = self._timeline.blocks[number].size_bytes
            if number in dropped:
                free = at_backward if self._owner(number) == CASTS else at_end
                part.deltas += [(free, 0, -size), (again, self._makers[number], size)]
            elif self._makers[number] <= needed:
                _, gone = self._life(number)
                until = self._timeline.events[int(gone)][1] if gone <= at_end else needed + 1
                part.deltas += [(again, self._makers[number], size), (again, min(until, needed + 1), -size)]
        for index in ops:
            for ref in self._step.ops[index].inputs:
                if self._makers.get(ref.id, -1) < part.first and self._owner(ref.id) not in _HELD:
                    part.reads[ref.id] = again + 0.25
        part.extra_s = sum(self._times[i].time_s for i in ops if i <= needed)
        return part

    def _life(self, number: int) -> tuple[float, float]:
        made, *freed = self._lives[number]
        return made, freed[0] if freed else float("inf")

    def _is_saved(self, number: int, path: str) -> bool:
        """The module's own backward pass reads it."""
        return any(op >= self._backward and path in self._paths[op] for op in self._readers[number])

    def _is_dropped(self, number: int, path: str, start: int) -> bool:
        """It is there when the module's backward pass begins, and only its own operations read it."""
        _, gone = self._life(number)
        if gone < self._from[start] or self._owner(number) in _HELD:
            return False
        return all(path in self._paths[op] for op in self._readers[number])

    # ---- the timeline of a choice --------------------------------------------------------------

    def _changed(self, chosen: Iterable[str]) -> list[_Delta]:
        deltas: list[_Delta] = []
        kept: dict[int, float] = {}
        for path in chosen:
            part = self.parts[path]
            deltas += part.deltas
            for number, until in part.reads.items():
                kept[number] = max(kept.get(number, 0.0), until)
        for number, until in kept.items():
            made, gone = self._life(number) if number in self._lives else (0.0, float("inf"))
            if made < gone < until:
                size = self._timeline.blocks[number].size_bytes
                deltas += [(gone, 1, size), (until, 1 << 30, -size)]
        return deltas

    def _peak(self, chosen: Iterable[str]) -> tuple[int, float]:
        """The most bytes alive, and the event then."""
        live = most = 0
        at = 0.0
        for place, _, size in sorted([*self._events, *self._changed(chosen)]):
            live += size
            if live > most:
                most, at = live, place
        return most, at

    def of(self, chosen: Iterable[str]) -> Recomputed:
        """What a choice of modules, none within another, takes."""
        paths = sorted(chosen, key=lambda path: self.parts[path].first)
        return Recomputed(tuple(paths), self._peak(paths)[0], sum(self.parts[p].extra_s for p in paths))

    # ---- the choice ----------------------------------------------------------------------------

    def within(self, budget_bytes: float) -> Recomputed:
        """The modules that bring the peak below a budget for the least time that a greedy search finds; where
        none do, those that bring it down the most."""
        chosen: set[str] = set()
        best = self.of(chosen)
        while True:
            peak, at = self._peak(chosen)
            if peak < best.peak_bytes:
                best = self.of(chosen)
            if peak <= budget_bytes:
                return self.of(self._without_idle(chosen, budget_bytes))
            better = self._next(chosen, at, peak - budget_bytes)
            if better is None:
                return best
            chosen = better

    def _next(self, chosen: set[str], at: float, need: float) -> set[str] | None:
        """The choice with one more module: the one that costs least for each byte that it frees at ``at``."""
        inner = {path: self._relief(path, at) for path in chosen}

        def choices() -> Iterator[tuple[float, set[str]]]:
            for path, part in self.parts.items():
                if path in chosen or any(outer in chosen for outer in _around(path)):
                    continue
                replaced = {p for p in chosen if p.startswith(f"{path}.")}
                relief = self._relief(path, at) - sum(inner[p] for p in replaced)
                if relief > 0:
                    extra_s = part.extra_s - sum(self.parts[p].extra_s for p in replaced)
                    yield (extra_s + _COUNTED * CALL_S) / min(relief, need), (chosen - replaced) | {path}

        return min(choices(), key=lambda choice: choice[0], default=(0.0, None))[1]

    def _relief(self, path: str, at: float) -> int:
        return -sum(size for place, _, size in self._changed([path]) if place <= at)

    def _without_idle(self, chosen: set[str], budget_bytes: float) -> set[str]:
        """The choice without those modules that it does not need, the dearest first."""
        for path in sorted(chosen, key=lambda path: (-self.parts[path].extra_s, self.parts[path].first)):
            if self._peak(chosen - {path})[0] <= budget_bytes:
                chosen = chosen - {path}
        return chosen


def _around(path: str) -> list[str]:
    """A module and all that it is a part of, the model itself left out."""
    parts = path.split(".") if path else []
    return [".".join(parts[: length + 1]) for length in range(len(parts))]
