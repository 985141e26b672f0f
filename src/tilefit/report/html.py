"""For notebooks: one self-contained element, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape as _escape

from tilefit import units
from tilefit.formats import renders
from tilefit.report import program, text
from tilefit.report.report import Document, Report, across
from tilefit.report.watched import Watched
from tilefit.rules.finding import Alarm, Finding

# Inherits the notebook's colours, so that it reads on light and dark pages.
_STYLE = """
.tilefit{font:13px/1.5 system-ui,sans-serif;max-width:60em}
.tilefit h3{margin:0 0 .2em;font-size:1.15em}
.tilefit table{border-collapse:collapse;margin:.6em 0}
.tilefit th,.tilefit td{text-align:left;padding:.15em 1.2em .15em 0;border:0;background:none}
.tilefit th{font-weight:normal;opacity:.65}
.tilefit .quiet{opacity:.65}
.tilefit details{border-left:3px solid #8886;padding:.1em 0 .1em .8em;margin:.5em 0}
.tilefit details.warning{border-color:#d90}
.tilefit details.error{border-color:#d33}
.tilefit summary{cursor:pointer}
.tilefit code{font-size:.95em}
"""


@renders(Document, "notebook")
def render(document: Document) -> str:
    """The report as an HTML fragment; everything that comes from the model is escaped."""
    if isinstance(document, Watched):
        return _watched(document)
    reports = document.reports
    first = reports[0]
    parts = [
        f"<h3>{escape(text.heading(first))}</h3>",
        f'<div class="quiet">{" · ".join(escape(phrase) for phrase in text.setup(first))}</div>',
        _table(["", *(report.device.title for report in reports)], text.compared(reports)),
    ]
    if len(reports) > 1:
        rows = [[row.code, row.module, *map(text.gain_cell, row.per_gpu)] for row in across(reports)]
        parts.append(_table(["saves", "", *(report.gpu for report in reports)], rows))
    else:
        parts += [*map(_item, first.findings)] or [f"<p>{text.NOTHING}</p>"]
        if first.program is not None:
            parts += _program(first.program)
        parts.append(_footer(first))
    return _element(parts)


def _watched(document: Watched) -> str:
    parts = [
        f"<h3>{escape(text.watched_heading(document))}</h3>",
        f'<div class="quiet">{" · ".join(map(escape, document.setup))}</div>',
        *(map(_item, document.findings) if document.findings else [f"<p>{text.NOTHING_WRONG}</p>"]),
        *(
            f"<details><summary>{escape(table.title)}</summary>{_table(table.header, table.rows)}</details>"
            for table in document.tables
        ),
        *(f'<div class="quiet">Not checked: {escape(what)}</div>' for what in document.unchecked),
    ]
    return _element(parts)


def _element(parts: Iterable[str]) -> str:
    return f'<div class="tilefit"><style>{_STYLE}</style>{"".join(parts)}</div>'


def escape(value: str) -> str:
    """Text that HTML shows as it is."""
    return _escape(text.plain(value), quote=True)


def _item(item: Finding | Alarm) -> str:
    place, *more = map(escape, text.places(item) or [""])
    lines = "".join(f'<div class="quiet">{escape(line)}</div>' for line in item.arithmetic)
    head = f"<b>{escape(item.code)}</b> {escape(text.price(item))}"
    return (
        f'<details class="{escape(item.severity)}"><summary>{head} '
        f"<code>{place}</code><br>{escape(item.message)}</summary>{lines}"
        f'<div>→ {escape(item.fix)} <span class="quiet">{escape(text.level(item))}</span></div>'
        f'<div class="quiet">{"".join(more)}</div></details>'
    )


def _program(around: program.Around) -> Iterator[str]:
    yield _table(["", "the program"], [*program.headline(around), *program.footer(around)])
    for title, lines in program.everything(around):
        listed = "".join(f'<div class="quiet">{escape(line)}</div>' for line in lines)
        yield f"<details><summary>{escape(title)}</summary>{listed}</details>"


def _footer(report: Report) -> str:
    total_s = sum(report.step.kinds_s.values()) or 1.0
    kinds = sorted(report.step.kinds_s.items(), key=lambda pair: -pair[1])
    lines = [
        "GPU time: " + ", ".join(f"{name} {units.share(time_s / total_s)}" for name, time_s in kinds[:6]),
        f"Covers {text.coverage(report)}. Times {text.times(report.step.provenance, report.profile)}.",
        *report.notes,
    ]
    return "".join(f'<div class="quiet">{escape(line)}</div>' for line in lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
