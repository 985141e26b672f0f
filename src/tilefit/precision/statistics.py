"""Operations by element type, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from tilefit.precision.graph import Kind
from tilefit.report.watched import Table


class Statistics:
    """Counts operations by the element type of their first result, and what backward passes go through by
    that of the gradient given to it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counter[torch.dtype]] = {}

    def of(self, name: str, phase: str) -> Counter[torch.dtype]:
        """Where the operations of a name that run in a phase are counted: ``forward``, ``recomputed``, or
        ``backward`` for nodes of the autograd graph."""
        return self._counts.setdefault((name, phase), Counter())

    def passed(self, nodes: Mapping[Kind, int]) -> None:
        """Count the nodes that a backward pass went through, by name and element type."""
        for (name, dtype), count in nodes.items():
            if dtype is not None:
                self.of(name.rpartition("::")[2], "backward")[dtype] += count

    def table(self) -> Table:
        """The floating-point operations, the most frequent first; no rows where none was seen."""
        rows: dict[tuple[str, str], dict[str, int]] = {}
        for key, by_type in self._counts.items():
            floating = {
                str(dtype).removeprefix("torch."): count
                for dtype, count in by_type.items()
                if dtype.is_floating_point
            }
            if floating:
                rows[key] = floating
        return _table(rows)


def _table(rows: dict[tuple[str, str], dict[str, int]]) -> Table:
    types = sorted({dtype for row in rows.values() for dtype in row})
    ordered = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    return Table(
        "Operations by element type, on the steps looked at closely; going backward, nodes of the autograd "
        "graph by the gradient given to them",
        ("operation", "phase", *types),
        tuple((name, phase, *(str(row.get(d, "")) for d in types)) for (name, phase), row in ordered),
    )
