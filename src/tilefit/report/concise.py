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
        return "".join(f"{line(document, alarm)}\n" for alarm in document.findings)
    several = len(document.reports) > 1
    return "".join(
        f"{line(report, finding)}{f' on {report.gpu}' if several else ''}\n"
        for report in document.reports
        for finding in report.findings
    )


def line(document: Report | Watched, item: Finding | Alarm) -> str:
    """``source: CODE message [gain]``."""
    title = document.title if isinstance(document, Watched) else document.model
    where = getattr(item, "origin", "") or item.source or item.module or title
    return f"{text.plain(where)}: {item.code} {text.plain(item.message)} [{text.price(item)}]"
