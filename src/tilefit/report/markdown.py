"""For pull requests and notes: GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tilefit import units
from tilefit.report import text
from tilefit.report.report import Document, Report, across
from tilefit.report.watched import Watched
from tilefit.rules.finding import Finding

#: What Markdown or the HTML inside it gives a meaning to, anywhere or at the start of a line.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$@#])")
_LEADING = re.compile(r"^(\d*)([-+=.)])")


def render(document: Document, *, ops: bool = False) -> str:
    """The whole report, with the table of operations by time where ``ops`` is set."""
    if isinstance(document, Watched):
        return _watched(document)
    reports = document.reports
    first = reports[0]
    lines = [f"# {escape(text.heading(first))}", "", _and(map(escape, text.setup(first))), ""]
    labels = [escape(report.device.title) for report in reports]
    lines += _table(["", *labels], [[label, *map(cell, reports)] for label, cell in text.COMPARED])
    if len(reports) > 1:
        rows = [[row.code, escape(row.module), *map(text.gain_cell, row.per_gpu)] for row in across(reports)]
        lines += ["", "## What each change saves", "", *_table(["rule", "module", *labels], rows)]
    for report in reports:
        lines += [
            "",
            f"## Findings on {escape(report.device.title)}" if len(reports) > 1 else "## Findings",
            "",
        ]
        lines += _findings(report)
        if ops:
            lines += ["", "### Operations by time", "", *_ops(report)]
        lines += [
            "",
            f"Covers {escape(text.coverage(report))}. "
            f"Times {text.times(report.step.provenance, report.profile)}.",
        ]
        lines += [f"\n{escape(note)}" for note in report.notes]
    return "\n".join(lines) + "\n"


def _watched(document: Watched) -> str:
    lines = [f"# {escape(text.watched_heading(document))}", "", _and(map(escape, document.setup)), ""]
    lines += ["## Findings", ""]
    for number, alarm in enumerate(document.findings, 1):
        where = [escape(alarm.source), escape(alarm.module)]
        lines.append(
            ", ".join([f"{number}. **{alarm.code}** {text.seen(alarm)}", *filter(None, where)]) + "  "
        )
        lines.append(f"   {escape(alarm.message)}")
        lines += [f"   - {escape(line)}" for line in alarm.arithmetic]
        lines.append(f"   - Fix: {escape(alarm.fix)}")
    lines += [] if document.findings else [text.NOTHING_WRONG]
    for table in document.tables:
        cells = [[escape(cell) for cell in row] for row in table.rows]
        lines += [
            "",
            f"## {escape(table.title)}",
            "",
            *_table([escape(head) for head in table.header], cells),
        ]
    lines += [f"\nNot checked: {escape(what)}" for what in document.unchecked]
    return "\n".join(lines) + "\n"


def escape(value: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _LEADING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text.plain(value)))


def _findings(report: Report) -> list[str]:
    if not report.findings:
        return [text.NOTHING]
    lines: list[str] = []
    for number, finding in enumerate(report.findings, 1):
        lines += [f"{number}. {_head(finding)}  ", f"   {escape(finding.message)}"]
        lines += [f"   - {escape(line)}" for line in finding.arithmetic]
        lines.append(f"   - Fix ({finding.safety}): {escape(finding.fix)}")
    return lines


def _head(finding: Finding) -> str:
    where = [escape(text.site(finding)), escape(finding.source)]
    return ", ".join([f"**{finding.code}** {text.gain(finding)}", *filter(None, where)])


def _ops(report: Report) -> list[str]:
    groups = text.grouped(report.ops)
    total_s = sum(group.time_s for group in groups) or 1.0
    rows = [
        [
            units.seconds(group.time_s),
            units.share(group.time_s / total_s),
            str(group.count),
            escape(text.op_label(group.op)),
            text.PHASES[group.op.phase],
            group.op.bound,
            escape(group.module),
        ]
        for group in groups
    ]
    return _table(["time", "share", "count", "operation", "phase", "bound", "module"], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _and(phrases: Iterable[str]) -> str:
    return " · ".join(phrases)
