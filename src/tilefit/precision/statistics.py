"""Operations by element type, as a table."""

from __future__ import annotations

from collections import Counter

import torch

from tilefit.report.watched import Table


class Statistics:
    """Counts operations by the element type of their first result."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, bool], Counter[torch.dtype]] = {}

    def of(self, name: str, backward: bool) -> Counter[torch.dtype]:
        """Where the operations of a name are counted, those of backward passes apart."""
        return self._counts.setdefault((name, backward), Counter())

    def table(self) -> Table:
        """The floating-point operations, the most frequent first; no rows where none was seen."""
        rows: dict[tuple[str, str], dict[str, int]] = {}
        for (name, backward), by_type in self._counts.items():
            floating = {
                str(dtype).removeprefix("torch."): count
                for dtype, count in by_type.items()
                if dtype.is_floating_point
            }
            if floating:
                rows[name, "backward" if backward else "forward"] = floating
        return _table(rows)


def _table(rows: dict[tuple[str, str], dict[str, int]]) -> Table:
    types = sorted({dtype for row in rows.values() for dtype in row})
    ordered = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    return Table(
        "Operations by element type, on the steps looked at closely",
        ("operation", "phase", *types),
        tuple((name, phase, *(str(row.get(d, "")) for d in types)) for (name, phase), row in ordered),
    )
