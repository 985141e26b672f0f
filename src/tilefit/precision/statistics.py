"""Operations by element type, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilefit.report.watched import Table


def table_of(counts: Mapping[tuple[str, bool, Any], int]) -> Table:
    """Counts of operations (name, whether backward, element type) as a table, the most frequent first."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for (name, backward, dtype), count in counts.items():
        phase = "backward" if backward else "forward"
        rows.setdefault((name, phase), {})[str(dtype).removeprefix("torch.")] = count
    types = sorted({dtype for row in rows.values() for dtype in row})
    ordered = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    return Table(
        "Operations by element type, on the steps looked at closely",
        ("operation", "phase", *types),
        tuple((name, phase, *(str(row.get(d, "")) for d in types)) for (name, phase), row in ordered),
    )
