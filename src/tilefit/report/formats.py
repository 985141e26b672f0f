"""The formats a report can be written in."""

from __future__ import annotations

from collections.abc import Callable

from tilefit.errors import UsageError
from tilefit.report import concise, github, junit, markdown, sarif, terminal
from tilefit.report.report import Document

_WHOLE: dict[str, Callable[[Document], str]] = {
    "concise": concise.render,
    "json": lambda document: document.to_json() + "\n",
    "html": lambda document: document.to_html(),
    "sarif": sarif.render,
    "github": github.render,
    "junit": junit.render,
}
FORMATS = ("text", "markdown", *_WHOLE)


def render(
    document: Document, format: str = "text", *, show_all: bool = False, ops: bool = False, width: int = 80
) -> str:
    """The report as text in one of :data:`FORMATS`.

    Args:
        document: What to write.
        format: Its format.
        show_all: Every finding and total (``text``), of any length (``markdown``); the other formats always
            hold them all.
        ops: The operations too (``text`` and ``markdown``).
        width: Columns of the ``text`` format.

    Raises:
        UsageError: there is no such format.
    """
    if format == "text":
        return terminal.render(document, show_all=show_all, ops=ops, width=width)
    if format == "markdown":
        return markdown.render(document, ops=ops, show_all=show_all)
    if format in _WHOLE:
        return _WHOLE[format](document)
    raise UsageError(f"unknown format {format!r}", hint=f"Use one of: {', '.join(FORMATS)}.")
