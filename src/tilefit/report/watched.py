"""The report of a training run that was watched: what is wrong with it, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilefit.report.report import REPORT_SCHEMA, Document, Report
from tilefit.rules.finding import Alarm, RulePage


@dataclass(frozen=True, slots=True)
class Table:
    """Figures beside the findings: a title, the heads of the columns, and the rows as text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Watched(Document):
    """What was found in a run.

    Attributes:
        title: What was watched.
        setup: How it ran, a phrase each.
        steps: How many steps were watched.
        findings: What is wrong, the most severe first.
        tables: Figures beside them.
        unchecked: What could not be looked at, and why.
        version: The version of tilefit.
        rules: The documentation of the rules behind the findings.
    """

    title: str
    setup: tuple[str, ...]
    steps: int
    findings: tuple[Alarm, ...]
    tables: tuple[Table, ...]
    unchecked: tuple[str, ...]
    version: str
    rules: tuple[RulePage, ...] = ()

    @property
    def reports(self) -> tuple[Report, ...]:  # type: ignore[override]  # it is about no GPU
        """None: it is about no GPU."""
        return ()

    @property
    def exit_code(self) -> int:
        """1 if there are findings, 0 if not."""
        return int(bool(self.findings))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; ``kind`` tells it from the report of a check."""
        return {"schema_version": REPORT_SCHEMA, "kind": "watched", **asdict(self)}
