"""Operations by element type, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from tilefit.report.watched import Table


def table_of(counts: Mapping[tuple[str, str, str], int]) -> Table:
    """Counts of operations (name, phase, element type) as a table, the most frequent first."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for (name, phase, dtype), count in counts.items():
        rows.setdefault((name, phase), {})[dtype] = count
    types = sorted({dtype for row in rows.values() for dtype in row})
    ordered = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    return Table(
        "Operations by element type, on the steps looked at closely",
        ("operation", "phase", *types),
        tuple((name, phase, *(str(row.get(d, "")) for d in types)) for (name, phase), row in ordered),
    )
