"""The report of a training run that was watched: what is wrong with it, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilefit.report.report import REPORT_SCHEMA, Document, Report
from tilefit.rules.finding import NOTE, Alarm, RulePage

#: What became of a rule in a run.
CHECKED = "checked"
INAPPLICABLE = "not applicable"
CANNOT = "could not be checked"


@dataclass(frozen=True, slots=True)
class Table:
    """Figures beside the findings: a title, the heads of the columns, and the rows as text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Check:
    """What became of one rule in a run that was watched.

    Attributes:
        code: The rule's code.
        status: ``checked``, ``not applicable`` or ``could not be checked``.
        why: Why not, or what of it is never looked at; may be empty.
    """

    code: str
    status: str
    why: str = ""


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
        checks: What became of each rule: whether it could look at what it judges.
    """

    title: str
    setup: tuple[str, ...]
    steps: int
    findings: tuple[Alarm, ...]
    tables: tuple[Table, ...]
    unchecked: tuple[str, ...]
    version: str
    rules: tuple[RulePage, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def reports(self) -> tuple[Report, ...]:  # type: ignore[override]  # it is about no GPU
        """None: it is about no GPU."""
        return ()

    @property
    def exit_code(self) -> int:
        """1 with errors or warnings; notes are hints."""
        return int(any(alarm.severity != NOTE for alarm in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; ``kind`` tells it from the report of a check."""
        return {"schema_version": REPORT_SCHEMA, "kind": "watched", **asdict(self)}
