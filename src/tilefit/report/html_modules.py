"""The GPU's time by module, as a tree in which modules of the same structure are one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isclose

from tilefit.ops import OPTIMIZER, PHASES
from tilefit.report import text
from tilefit.report.report import OpRow

#: Parts of the tree with less than this share of the whole time are left out.
_LEAST_SHARE = 0.002

#: What is in no module: the model's own arithmetic between its parts, its loss.
OUTSIDE = "the model itself"


@dataclass(frozen=True, slots=True)
class Part:
    """A module, several of the same structure, or what a module does itself.

    Attributes:
        label: The last part of its path: ``c_fc``, ``0…11``.
        query: What finds its operations in the table.
        count: How many modules it stands for.
        time_s: Their time together; ``phases_s`` by phase.
        parts: What it consists of, those that take the most time first.
    """

    label: str
    query: str
    count: int
    time_s: float
    phases_s: dict[str, float]
    parts: tuple[Part, ...]


@dataclass(slots=True)
class _Node:
    """A module while the tree grows: its own time by phase, and its children by name."""

    own_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    children: dict[str, _Node] = field(default_factory=dict)

    def shape(self) -> tuple[object, ...]:
        """Equal for modules that consist of the same parts."""
        return tuple(sorted((name, child.shape()) for name, child in self.children.items()))


def tree(ops: Iterable[OpRow]) -> tuple[Part, ...]:
    """The parts of the model by time; the optimizer is one of them."""
    root = _Node()
    for op in ops:
        path = text.plain(op.module)
        outside = OPTIMIZER if op.phase == OPTIMIZER else OUTSIDE
        node = root
        for name in path.split(".") if path else [outside]:
            node = node.children.setdefault(name, _Node())
        node.own_s[op.phase] += op.time_s
    total_s = sum(_time_s(child) for child in root.children.values())
    return _parts([root], "", _LEAST_SHARE * total_s)


def _parts(nodes: Sequence[_Node], path: str, least_s: float) -> tuple[Part, ...]:
    """The children of modules of the same structure, taken together."""
    together: dict[tuple[object, ...], list[tuple[str, _Node]]] = defaultdict(list)
    for node in nodes:
        for name, child in node.children.items():
            # Blocks of a list are alike where they consist of the same parts; a part without parts is told
            # by its name alone, as in a Sequential of unlike layers.
            alike = child.shape() if name.isdigit() else ()
            together[("", alike) if alike else (name,)].append((name, child))
    parts = [_part(same, path, least_s) for same in together.values()]
    shown = [part for part in parts if part.time_s >= least_s]
    return tuple(sorted(shown, key=lambda part: -part.time_s))


def _part(same: Sequence[tuple[str, _Node]], path: str, least_s: float) -> Part:
    names = list(dict.fromkeys(name for name, _ in same))
    nodes = [node for _, node in same]
    label = names[0] if len(names) == 1 else _numbers(sorted(map(int, names)))
    query = f"{path}.{names[0] if len(names) == 1 else '*'}".lstrip(".")
    phases_s = {phase: sum(_time_s(node, phase) for node in nodes) for phase in PHASES}
    time_s = sum(phases_s.values())
    parts = _parts(nodes, query, least_s)
    if len(parts) == 1 and isclose(parts[0].time_s, time_s):
        return replace(parts[0], label=f"{label}.{parts[0].label}")
    return Part(label, query, len(nodes), time_s, phases_s, parts)


def _numbers(found: Sequence[int]) -> str:
    """Increasing numbers of modules: ``0…11``, ``2, 4, 6``, ``0, 2, …, 22``."""
    if found[-1] - found[0] == len(found) - 1:
        return f"{found[0]}…{found[-1]}"
    shown = map(str, found) if len(found) < 5 else (str(found[0]), str(found[1]), "…", str(found[-1]))
    return ", ".join(shown)


def _time_s(node: _Node, phase: str = "") -> float:
    """Time of a module and of all in it, in one phase or in all."""
    own_s = node.own_s.get(phase, 0.0) if phase else sum(node.own_s.values())
    return own_s + sum(_time_s(child, phase) for child in node.children.values())
