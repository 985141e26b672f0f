"""For pull requests, chats and notes: GitHub-flavoured Markdown, short enough for any of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tilefit.formats import renders
from tilefit.report import program, text
from tilefit.report.report import Document, Report, across
from tilefit.report.watched import Watched
from tilefit.rules.finding import Alarm, Finding

#: The most a report takes unless all of it is asked for, in UTF-8: what a message of a chat may hold.
LIMIT_BYTES = 4000
#: Of it, kept for the line that says what was left out.
_LAST_LINE_BYTES = 400
#: A paragraph, and an item in one line, of a report that is too long.
_PARAGRAPH_BYTES = 600
_ITEM_BYTES = 300
#: Findings that come with their arithmetic in a report that is too long.
_IN_DETAIL = 3

#: What Markdown or the HTML inside it gives a meaning to, anywhere or at the start of a line.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$@#])")
_LEADING = re.compile(r"^(\d*)([-+=.)])")


@renders(Document, "markdown")
def render(document: Document, *, ops: bool = False, show_all: bool = False) -> str:
    """The report in at most :data:`LIMIT_BYTES`, or with ``show_all`` whatever its length.

    Where it is too long, the findings that save most keep their arithmetic, the others have a line each, and
    the last line says what was left out.

    Args:
        document: What to write.
        ops: The operations by time too.
        show_all: Everything.
    """
    parts = _watched(document) if isinstance(document, Watched) else _checked(document, ops)
    return page(parts, show_all=show_all)


def page(parts: Sequence[Part], *, show_all: bool = False) -> str:
    """Parts with an empty line between them, in at most :data:`LIMIT_BYTES` unless ``show_all`` is set."""
    whole = "\n\n".join(part.whole for part in parts) + "\n"
    return whole if show_all or _size(whole) <= LIMIT_BYTES else _shortened(parts)


def escape(value: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _LEADING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text.plain(value)))


# ---- what there is to say ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A paragraph, or a list or table with its heading.

    Attributes:
        head: The paragraph, or what comes before the items.
        items: Findings or rows; none in a paragraph.
        brief: The findings in a line each.
        worth: What each finding saves.
        noun: What the items are, or the paragraph is, for the words on what was left out.
        optional: It gets the room that the other parts leave.
    """

    head: str
    items: tuple[str, ...] = ()
    brief: tuple[str, ...] = ()
    worth: tuple[str, ...] = ()
    noun: str = ""
    optional: bool = False

    @property
    def whole(self) -> str:
        """Its text, with all items."""
        return "\n".join((self.head, *self.items))


def _checked(document: Document, ops: bool) -> list[Part]:
    reports = document.reports
    first = reports[0]
    parts = _head(text.heading(first), text.setup(first))
    labels = [escape(report.device.title) for report in reports]
    parts.append(table(["", *labels], text.compared(reports), "rows of figures"))
    if len(reports) > 1:
        rows = [[row.code, escape(row.module), *map(text.gain_cell, row.per_gpu)] for row in across(reports)]
        parts.append(table(["rule", "module", *labels], rows, "savings", "## What each change saves\n\n"))
    for report in reports:
        on = f" on {escape(report.device.title)}" if len(reports) > 1 else ""
        parts.append(_findings(f"## Findings{on}\n", report.findings, f"findings{on}", text.NOTHING))
        if ops:
            parts.append(_ops(report))
        if report.measured is not None:
            lines = [f"- {label}: {escape(words)}" for label, words in text.measured(report.measured)]
            parts.append(Part("\n".join(["## The run\n", *lines]), noun="the run"))
        if report.program is not None and report is first:
            parts += _program(report.program)
        covers = f"Covers {escape(text.coverage(report))}."
        times = f"Times {text.times(report.step.provenance, report.profile)}."
        parts.append(Part(f"{covers} {times}", noun="the coverage"))
        parts += [Part(escape(note), noun="a note") for note in report.notes]
    return parts


def _program(around: program.Around) -> Iterator[Part]:
    lines = [*program.headline(around), *program.footer(around)]
    said = "\n".join(f"- {label}: {escape(words)}" for label, words in lines)
    yield Part(f"## The program\n\n{said}", noun="the program")
    for title, each in program.everything(around):
        yield Part(
            f"### {title}\n", tuple(f"- {escape(line)}" for line in each), noun=title.lower(), optional=True
        )


def _watched(document: Watched) -> list[Part]:
    parts = _head(text.watched_heading(document), document.setup)
    parts.append(_findings("## Findings\n", document.findings, "findings", text.NOTHING_WRONG))
    for figures in document.tables:
        header = [escape(head) for head in figures.header]
        rows = [[escape(cell) for cell in row] for row in figures.rows]
        title = escape(figures.title)
        parts.append(table(header, rows, f"rows of {title}", f"## {title}\n\n", optional=True))
    parts += [
        Part(f"Not checked: {escape(what)}", noun="what was not checked") for what in document.unchecked
    ]
    return parts


def _head(heading: str, setup: Iterable[str]) -> list[Part]:
    return [
        Part(f"# {escape(heading)}", noun="the heading"),
        Part(" · ".join(map(escape, setup)), noun="the settings"),
    ]


def _findings(head: str, findings: Sequence[Finding | Alarm], noun: str, nothing: str) -> Part:
    """Findings as a numbered list; ``nothing`` where there is none."""
    if not findings:
        return Part(f"{head}\n{nothing}", noun=noun)
    items, brief, worth = [], [], []
    for number, each in enumerate(findings, 1):
        worth.append(text.at_most([each, each]) if isinstance(each, Finding) else "")
        place = ", ".join([f"{number}. **{each.code}** {text.price(each)}", *map(escape, text.places(each))])
        brief.append(_clipped(f"{place}: {escape(each.message)}", _ITEM_BYTES))
        details = [*map(escape, each.arithmetic), f"Fix{text.level(each)}: {escape(each.fix)}"]
        lines = [f"{place}  ", f"   {escape(each.message)}", *(f"   - {line}" for line in details)]
        items.append("\n".join(lines))
    return Part(head, tuple(items), tuple(brief), tuple(worth), noun)


def _ops(report: Report) -> Part:
    rows = text.op_rows(report)
    header = [name.removeprefix(">") for name in (rows or [{}])[0]]
    named = ("operation", "module")
    cells = [[escape(cell) if name in named else cell for name, cell in row.items()] for row in rows]
    return table(header, cells, "rows of operations", "### Operations by time\n\n", optional=True)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    noun: str,
    title: str = "",
    *,
    optional: bool = False,
) -> Part:
    """A table of escaped cells, its title with the empty line after it."""
    head, rule, *body = (f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
    return Part(f"{title}{head}\n{rule}", tuple(body), noun=noun, optional=optional)


# ---- what of it fits ---------------------------------------------------------------------------


def _shortened(parts: Sequence[Part]) -> str:
    """As much as fits, part by part and item by item, and what was left out."""
    room = LIMIT_BYTES - _LAST_LINE_BYTES
    kept: dict[int, str] = {}
    left_out: dict[int, str] = {}
    for index in sorted(range(len(parts)), key=lambda index: parts[index].optional):
        part = parts[index]
        head = part.head if part.items else _clipped(part.head, _PARAGRAPH_BYTES)
        items = _that_fit(part, room - _size(head) - 2)
        missing = len(part.items) - len(items)
        if missing:
            worth = part.worth[len(items)] if part.worth else ""
            left_out[index] = f"{missing} {part.noun}{worth}"
        block = "\n".join((head, *items))
        if _size(block) + 2 <= room and (items or not part.items):
            kept[index] = block
            room -= _size(block) + 2
        elif not missing:
            left_out[index] = part.noun
    words = "; ".join(left_out[index] for index in sorted(left_out))
    last = _clipped(f"Left out, to keep this short: {words}.", _LAST_LINE_BYTES - 2)
    return "\n\n".join([*(kept[index] for index in sorted(kept)), last]) + "\n"


def _that_fit(part: Part, room: int) -> list[str]:
    """The first items of a part, in detail or in a line each, as far as the room goes."""
    fitting: list[str] = []
    for index, item in enumerate(part.items):
        detailed = not part.brief or index < _IN_DETAIL
        choices = [*([item] if detailed else []), *part.brief[index : index + 1]]
        chosen = next((choice for choice in choices if _size(choice) + 1 <= room), None)
        if chosen is None:
            break
        fitting.append(chosen)
        room -= _size(chosen) + 1
    return fitting


def _clipped(line: str, limit_bytes: int) -> str:
    """The beginning of escaped text, cut between two characters and not within an escape."""
    if _size(line) <= limit_bytes:
        return line
    start = line.encode(errors="replace")[: limit_bytes - len("…".encode())].decode(errors="ignore")
    return start.rstrip("\\") + "…"


def _size(value: str) -> int:
    return len(value.encode(errors="replace"))
