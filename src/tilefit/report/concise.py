"""For other programs and for grep: a line per finding."""

from __future__ import annotations

from tilefit.formats import renders
from tilefit.report import text
from tilefit.report.report import Document, Report
from tilefit.report.watched import Watched
from tilefit.rules.finding import Alarm, Finding


@renders(Document, "concise")
def render(document: Document) -> str:
    """``source: CODE message [gain]`` per finding, best first; nothing where nothing was found."""
    if isinstance(document, Watched):
        return "".join(f"{_alarm(document, alarm)}\n" for alarm in document.findings)
    several = len(document.reports) > 1
    return "".join(
        f"{line(report, finding)}{f' on {report.gpu}' if several else ''}\n"
        for report in document.reports
        for finding in report.findings
    )


def line(report: Report, finding: Finding) -> str:
    """``source: CODE message [gain]``."""
    where = finding.source or finding.module or report.model
    return f"{text.plain(where)}: {finding.code} {text.plain(finding.message)} [{text.gain(finding)}]"


def _alarm(document: Watched, alarm: Alarm) -> str:
    where = alarm.source or alarm.module or document.title
    return f"{text.plain(where)}: {alarm.code} {text.plain(alarm.message)} [{text.seen(alarm)}]"
