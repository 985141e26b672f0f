"""The formats a report can be written in."""

from __future__ import annotations

from tilefit.errors import UsageError
from tilefit.report import concise, markdown, terminal
from tilefit.report.report import Document

FORMATS = ("text", "concise", "json", "markdown")


def render(
    document: Document, format: str = "text", *, show_all: bool = False, ops: bool = False, width: int = 80
) -> str:
    """The report as text in one of :data:`FORMATS`.

    Args:
        document: What to write.
        format: Its format.
        show_all: Every finding and total (``text``); the other formats always hold them all.
        ops: The operations too.
        width: Columns of the ``text`` format.

    Raises:
        UsageError: there is no such format.
    """
    if format == "text":
        return terminal.render(document, show_all=show_all, ops=ops, width=width)
    if format == "concise":
        return concise.render(document)
    if format == "json":
        return document.to_json(ops=ops) + "\n"
    if format == "markdown":
        return markdown.render(document, ops=ops)
    raise UsageError(f"unknown format {format!r}", hint=f"Use one of: {', '.join(FORMATS)}.")
