"""The HTML page: one file that needs no network, with everything a report holds.

The templates, the style and the script lie in ``page/``. Every name comes from the user's code: Jinja escapes
all that it inserts, and the content security policy allows no script but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from tilefit import units
from tilefit.formats import renders
from tilefit.report import html_figures, html_measured, html_modules, html_operations, program, text
from tilefit.report.answer import answer, bulk, price_of, work
from tilefit.report.report import Document, Report, across
from tilefit.report.watched import Table, Watched
from tilefit.rules.finding import ERROR, THROUGHPUT

if TYPE_CHECKING:
    from jinja2 import Environment

#: Rows of the table of operations that are shown until all are asked for.
ROWS_SHOWN = 40


@renders(Document, "html")
def render(document: Document, *, prices: Mapping[str, float] | None = None) -> str:
    """The page of a report, a comparison, or a watched run; ``prices`` as of :func:`answer`."""
    if isinstance(document, Watched):
        tables = [(table, _numeric(table)) for table in document.tables]
        title = text.watched_heading(document)
        return page("watched.html", title=title, document=document, tables=tables)
    first = document.reports[0]
    views = [_view(report, prices) for report in document.reports]
    return page(
        "report.html",
        title=f"{text.heading(first)} on {', '.join(report.device.title for report in document.reports)}",
        heading=text.heading(first),
        setup=text.setup(first),
        views=views,
        compared=text.compared(document.reports),
        across=across(document.reports),
        version=first.version,
    )


def _view(report: Report, prices: Mapping[str, float] | None) -> dict[str, Any]:
    """A report with what its figures and tables are drawn from."""
    rows = html_operations.rows(report)
    return {
        "report": report,
        "answer": answer(report, prices),
        "choices": _choices(report, price_of(report, prices)),
        "lanes": html_figures.step_lanes(report),
        "bars": _bars(report),
        "host_limit": text.host_limit(report),
        "memory": _memory(report),
        "beside": text.memory(report)[1:],
        "timeline": html_figures.memory_timeline(report.step.memory.timeline),
        "run": html_measured.facts(report.measured) if report.measured else [],
        "agreement": html_figures.agreement([row.group for row in rows]),
        "differences": html_measured.differences(rows),
        "curve": html_figures.batch_curve(report),
        "modules": html_modules.tree(report.ops),
        "rows": rows,
        "unit": html_operations.time_unit(rows),
        "roofline": html_figures.roofline(report, [row.group for row in rows], [row.rate for row in rows]),
        "data": html_operations.data(report, rows),
        "gpu_s": sum(op.time_s for op in report.ops),
        "program": _program(report.program) if report.program else None,
    }


def _choices(report: Report, price: float | None) -> dict[str, Any] | None:
    """What the page's script needs to say what some findings save together; None where there is no choice."""
    if not report.combinations:
        return None
    unit, items = work(report)
    name, amount = bulk(unit)
    return {
        "findings": sorted({index for each in report.combinations for index in each.findings}),
        "times": {",".join(map(str, each.findings)): each.time_s for each in report.combinations},
        "time": report.step.time_s,
        "unit": unit,
        "items": items,
        "bulk": name,
        "amount": amount,
        "price": price,
    }


def _bars(report: Report) -> list[tuple[str, list[tuple[str, str, float]]]]:
    """Three ways to divide the time: (title, parts), a part being (colour class, name, seconds)."""
    step = report.step
    kinds = sorted(step.kinds_s.items(), key=lambda pair: -pair[1])
    colored = [(name, name, time_s) for name, time_s in kinds if name in html_figures.COLORED_KINDS]
    rest_s = sum(step.kinds_s.values()) - sum(time_s for *_, time_s in colored)
    return [
        (
            "limited by",
            [(name, name, time_s) for name, time_s in step.bounds_s.items() if time_s],
        ),
        (
            "by pass",
            [
                (phase, name, step.phases_s[phase])
                for phase, name in text.PHASE_NAMES.items()
                if step.phases_s.get(phase)
            ],
        ),
        ("by kind", [*colored, *([("other", "other kinds", rest_s)] if rest_s > 0 else [])]),
    ]


def _program(around: program.Around) -> dict[str, Any]:
    """Lines on the program, and lists to unfold."""
    return {
        "lines": [*program.headline(around), *program.footer(around)],
        "lists": list(program.everything(around)),
    }


def _memory(report: Report) -> list[tuple[str, str, int]]:
    """What fills the memory at its fullest: (colour class, name, bytes)."""
    held = text.held(report.step.memory).items()
    return [(html_figures.memory_color(owner), owner, size) for owner, size in held if size]


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers, and are aligned to the right."""
    return [
        all(not row[column] or row[column][0].isdigit() for row in table.rows)
        for column in range(len(table.header))
    ]


def page(template: str, **values: Any) -> str:
    """A template of ``page/`` filled in, with the style, the script and the policy that all pages have."""
    environment = _environment()
    assert environment.loader is not None
    style, script = (environment.loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    made = environment.get_template(template).render(
        style=Markup(style), script=Markup(script), policy=policy, **values
    )
    return made.rstrip("\n") + "\n"


def _hash(content: str) -> str:
    """A content security policy's name of what lies between two tags."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _marked(paragraph: str) -> Markup:
    """A paragraph of a rule's page, with what is between backticks as code."""
    parts = re.split(r"`+([^`]+)`+", text.plain(paragraph))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part for index, part in enumerate(parts)
    )


def _lines(code: str) -> Markup:
    """Lines of code, or of a patch: the one text of several lines, indented as it is."""
    lines = code.expandtabs(4).splitlines()
    indents = (line[: len(line) - len(line.lstrip(" "))] for line in lines)
    return Markup("\n").join(indent + text.plain(line) for indent, line in zip(indents, lines, strict=True))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tilefit.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Names may hold control characters and line ends; what is markup already is the page's own.
        finalize=lambda value: text.plain(value) if type(value) is str else value,
    )
    environment.globals.update(
        gain=text.gain,
        gain_cell=text.gain_cell,
        site=text.site,
        seen=text.seen,
        coverage=text.coverage,
        seconds=units.seconds,
        capacity=units.capacity,
        interval=units.interval,
        times=text.times,
        next_commands=text.next_commands,
        nothing=text.NOTHING,
        nothing_wrong=text.NOTHING_WRONG,
        rows_shown=ROWS_SHOWN,
        phases=text.PHASE_NAMES,
        error=ERROR,
        throughput=THROUGHPUT,
    )
    environment.filters.update(
        seconds=units.seconds,
        share=units.share,
        size=units.size,
        capacity=units.capacity,
        rate=units.rate,
        number=units.number,
        grouped=units.count,
        marked=_marked,
        lines=_lines,
    )
    return environment
