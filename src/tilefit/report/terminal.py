"""For people at a terminal: the answer first, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tilefit import units
from tilefit.console import table
from tilefit.formats import renders
from tilefit.report import program, text
from tilefit.report.answer import answer
from tilefit.report.report import Document, Report, across
from tilefit.report.watched import Watched
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm, Finding

#: Lines of a screen, and the fewest findings shown whatever their length.
SCREEN_LINES = 40
FEWEST_FINDINGS = 3
#: Rows of the table of operations unless all are asked for.
OP_ROWS = 25

_INDENT = 8
_BAR_WIDTH = 12
#: Narrower than this, the table of operations does without these.
_WIDE = 100
_WHERE_WIDE = ("bound", ">predicted", ">roof")
_SEVERITY_STYLE = {ERROR: "bold red", WARNING: "bold yellow", NOTE: "bold cyan"}
# A glyph each, so that the bar can be read without colour.
_BOUND_BAR = {
    "math": ("█", "green"),
    "memory": ("▒", "yellow"),
    "latency": ("░", "magenta"),
    "launch": ("·", "red"),
    "waits": ("╌", "blue"),
    "communication": ("≈", "cyan"),
}


@renders(Document, "text")
def render(
    document: Document,
    *,
    show_all: bool = False,
    ops: bool = False,
    prices: Mapping[str, float] | None = None,
) -> RenderableType:
    """A report or a comparison on a terminal.

    Args:
        document: What to show.
        show_all: Every finding with all its arithmetic, and more totals.
        ops: The table of operations by time as well.
        prices: Of a GPU for an hour, by name; "" stands for all others.
    """
    return _Screen(document, show_all, ops, prices)


@dataclass(frozen=True, slots=True)
class _Screen:
    document: Document
    show_all: bool
    ops: bool
    prices: Mapping[str, float] | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if isinstance(self.document, Watched):
            yield from _watched(self.document, options.max_width, self.show_all)
            return
        reports = self.document.reports
        if len(reports) > 1:
            yield _comparison(reports, options.max_width)
            return
        report = reports[0]
        head = _headline(report, options.max_width, self.prices)
        tail = _totals(report, self.show_all)
        yield head
        yield Text()
        room = SCREEN_LINES - sum(len(console.render_lines(part, options)) for part in (head, tail))
        yield from self._findings(report, room, console, options)
        if self.ops:
            yield _ops_table(report, options.max_width, self.show_all)
            yield Text()
        yield tail

    def _findings(
        self, report: Report, room: int, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        if not report.findings:
            yield Text(text.NOTHING, style="bold green")
            yield Text()
            return
        for shown, finding in enumerate(report.findings):
            block = _finding(finding, options.max_width, self.show_all)
            room -= len(console.render_lines(block, options))
            if not self.show_all and shown >= FEWEST_FINDINGS and room < 0:
                rest = report.findings[shown:]
                yield Text(f"{len(rest)} more{text.at_most(rest)}: add --all", style="dim")
                yield Text()
                return
            yield block


def _headline(report: Report, width: int, prices: Mapping[str, float] | None) -> RenderableType:
    step = report.step
    title = Text.assemble((text.heading(report), "bold"), f" on {text.plain(report.device.title)}")
    setup = Text(_flowed(text.setup(report), width), style="dim")
    grid = _labelled()
    if limit := text.host_limit(report):
        grid.add_row("Host", Text(limit, style="bold red"))
    around = program.headline(report.program) if report.program else []
    for label, words in around:
        grid.add_row(label, Text(text.plain(words)))
    grid.add_row("Time", _time(report))
    grid.add_row("Rate", _rate(report))
    grid.add_row("Bound", _bounds(report))
    memory = f"{units.capacity(step.memory_bytes)} of {units.capacity(report.device.memory_bytes)}"
    most = text.largest_batch(report)
    fit = f"  largest batch that fits {most}" if most else ""
    too_much = step.memory.share > 1
    if step.memory_bytes:  # a trace does not tell
        grid.add_row(
            "Memory",
            Text.assemble(
                (memory, "bold red" if too_much else "bold"), f" ({units.share(step.memory.share)})", fit
            ),
        )
    if prices:
        told = answer(report, prices)
        grid.add_row("Do", Text.assemble((told.title, "bold"), *(f"; {line}" for line in told.lines)))
    if report.measured is not None:
        for label, words in text.measured(report.measured):
            grid.add_row(label, Text(words))
    return Group(title, setup, Text(), grid)


def _time(report: Report) -> Text:
    step = report.step
    return Text.assemble(
        (units.seconds(step.time_s), "bold"),
        f" ({units.interval(step.low_s, step.high_s)})",
        f"  GPU {units.seconds(step.gpu_time_s)}, host {units.seconds(step.host_time_s)}",
    )


def _rate(report: Report) -> Text:
    step, device = report.step, report.device
    return Text.assemble(
        (units.rate(step.flop_per_s), "bold"),
        f"  {units.share(step.peak_share)} of the {device.peak_dtype} peak,"
        f" {units.rate(device.peak_flop_per_s)}",
    )


def _bounds(report: Report) -> RenderableType:
    """A bar of the step's time, and the same in words, each beside its glyph whatever the width."""
    parts = [(name, report.step.bounds_s.get(name, 0.0), *_BOUND_BAR[name]) for name in _BOUND_BAR]
    total_s = sum(time_s for _, time_s, _, _ in parts) or 1.0
    bar, words = Text(), list[Text]()
    edges = [0.0]
    for name, time_s, glyph, style in parts:
        edges.append(edges[-1] + time_s)
        start, end = (round(_BAR_WIDTH * edge / total_s) for edge in edges[-2:])
        bar.append(glyph * (end - start), style=style)
        if time_s >= 0.005 * total_s:
            words.append(Text.assemble((glyph, style), f" {name} {time_s / total_s:.0%}".replace("%", " %")))
    return Columns([bar, *words], padding=(0, 2))


def _finding(finding: Finding, width: int, show_all: bool) -> RenderableType:
    style = _SEVERITY_STYLE[finding.severity]
    head = Text.assemble((f"{finding.code:<{_INDENT}}", style), (text.gain(finding), "bold"))
    place, source = text.site(finding), text.plain(finding.source)
    if not show_all:
        source = source.rpartition("/")[2]
        place = _shortened(place, max(12, width - len(head) - 4 - len(source)))
    head.append(f"  {place}")
    if source and not show_all:
        head.append(f"  {source}", style="dim")
    lines = finding.arithmetic if show_all else finding.arithmetic[:1]
    body = _body(finding, lines, source if show_all else "")
    if show_all and finding.gain_s:
        body.add_row(Text("±", style="dim"), Text(f"80 % interval {text.likely(finding)}", style="dim"))
    if show_all and finding.next_command:
        body.add_row(Text("$", style="dim"), Text(text.plain(finding.next_command), style="cyan"))
    return Group(head, Padding(body, (0, 0, 0, _INDENT - 2)), Text())


def _body(item: Finding | Alarm, lines: Sequence[str], source: str = "") -> Table:
    """What is wrong, why, and what to do."""
    # A mark before each kind of line, so that plain text is as clear as colour.
    body = _labelled(gap=1, style="")
    if source:
        body.add_row("", Text(source, style="dim"))
    body.add_row("", Text(text.plain(item.message)))
    for line in lines:
        body.add_row(Text("·", style="dim"), Text(text.plain(line), style="dim"))
    body.add_row(Text("→", style="green"), Text.assemble(text.plain(item.fix), (text.level(item), "dim")))
    return body


def _watched(document: Watched, width: int, show_all: bool) -> Iterator[RenderableType]:
    yield Text(text.watched_heading(document), style="bold")
    yield Text(_flowed([text.plain(phrase) for phrase in document.setup], width), style="dim")
    yield Text()
    for alarm in document.findings:
        yield _alarm(alarm, show_all)
    if not document.findings:
        yield Text(text.NOTHING_WRONG, style="bold green")
        yield Text()
    for figures in document.tables if show_all else ():
        yield Text(text.plain(figures.title), style="dim")
        rows = ([Text(text.plain(cell)) for cell in row] for row in figures.rows)
        yield table(*map(text.plain, figures.header), rows=rows)
        yield Text()
    foot = _labelled()
    for what in document.unchecked:
        foot.add_row("Not checked", Text(text.plain(what)))
    for alarm in document.findings[:1]:
        foot.add_row("Next", Text(f"tilefit rule {alarm.code}", style="cyan"))
    for name, what in text.checks(document, show_all):
        foot.add_row(name, Text(text.plain(what)))
    if foot.row_count:
        yield foot


def _alarm(alarm: Alarm, show_all: bool) -> RenderableType:
    head = Text(f"{alarm.code:<{_INDENT}}", style=_SEVERITY_STYLE[alarm.severity])
    source = text.plain(alarm.source)
    head.append(source if show_all else source.rpartition("/")[2], style="bold")
    head.append(f"{'  ' if source else ''}{text.seen(alarm)}", style="dim")
    return Group(head, Padding(_body(alarm, alarm.arithmetic), (0, 0, 0, _INDENT - 2)), Text())


def _totals(report: Report, show_all: bool) -> RenderableType:
    grid = _labelled()
    kinds = sorted(report.step.kinds_s.items(), key=lambda pair: -pair[1])
    grid.add_row("GPU time", _shares(kinds if show_all else kinds[:5], sum(report.step.kinds_s.values())))
    if show_all:
        grid.add_row("By phase", _shares(list(report.step.phases_s.items()), report.step.gpu_time_s))
        grid.add_row(
            "Arithmetic", f"{units.flop(report.step.flop)}, {units.size(report.step.moved_bytes)} moved"
        )
        for label, words in text.memory(report):
            grid.add_row(label, Text(words))
    grid.add_row("Covers", Text(text.coverage(report)))
    grid.add_row("Times", text.times(report.step.provenance, report.profile))
    for note in report.notes:
        grid.add_row("Note", Text(text.plain(note)))
    for label, words in program.footer(report.program) if report.program else ():
        grid.add_row(label, Text(text.plain(words)))
    for title, lines in program.everything(report.program) if report.program and show_all else ():
        grid.add_row("", Text("\n".join([f"{title}:", *map(text.plain, lines)])))
    for index, command in enumerate(text.next_commands(report)):
        grid.add_row("" if index else "Next", Text(command, style="cyan"))
    return grid


def _shares(parts: Sequence[tuple[str, float]], total_s: float) -> str:
    return ", ".join(
        f"{name} {units.share(time_s / (total_s or 1.0))}" for name, time_s in parts if time_s > 0
    )


def _ops_table(report: Report, width: int, show_all: bool) -> RenderableType:
    every = text.op_rows(report)
    header = [name for name in (every or [{}])[0] if width >= _WIDE or name not in _WHERE_WIDE]
    rows = [[row[name] for name in header] for row in (every if show_all else every[:OP_ROWS])]
    for row in rows:
        row[header.index("operation")] = _shortened(row[header.index("operation")], width // 2 - 4)
    names = [name.removeprefix(">") for name in header]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    room = max(8, width - sum(widths[:-1]) - 2 * len(widths[:-1]))
    cells = ([*map(Text, row), Text(_shortened(module, room))] for *row, module in rows)
    shown = table(*header, rows=cells)
    if len(rows) == len(every):
        return shown
    rest = text.grouped(report.ops)[len(rows) :]
    rest_s = sum(group.time_s for group in rest) / (sum(op.time_s for op in report.ops) or 1.0)
    return Group(
        shown, Text(f"{len(rest)} more rows, {units.share(rest_s)} of the time: add --all", style="dim")
    )


def _comparison(reports: Sequence[Report], width: int) -> RenderableType:
    first = reports[0]
    parts: list[RenderableType] = [
        Text.assemble((text.heading(first), "bold"), f" on {len(reports)} GPUs"),
        Text(_flowed(text.setup(first), width), style="dim"),
        Text(),
    ]
    found = across(reports)
    # What each row is called, how much of that is in a style, and its cells.
    rows = [(label, "dim", len(label), cells) for label, *cells in text.compared(reports)]
    if found:
        rows += [("", "", 0, []), ("what a change saves", "bold", 99, [])]
    for row in found:
        label = f"{row.code}  {text.plain(row.module)}".rstrip()
        cells = [*map(text.gain_cell, row.per_gpu)]
        rows.append((label, _SEVERITY_STYLE[row.best.severity], len(row.code), cells))
    names = [text.plain(report.gpu) for report in reports]
    gap = 3
    widest = max(len(cell) for cells in (names, *(row[-1] for row in rows)) for cell in cells) + gap
    side_width = min(max(len(label) for label, *_ in rows), width - 2 * widest)
    # As many GPUs beside each other as fit, the rest below.
    per_table = max(1, (width - side_width) // widest)
    for start in range(0, len(reports), per_table):
        here = slice(start, start + per_table)
        side_by_side = Table(box=None, padding=(0, gap, 0, 0), show_edge=False, pad_edge=False)
        side_by_side.add_column("", width=side_width, no_wrap=True)
        for name in names[here]:
            side_by_side.add_column(Text(name, style="bold"), justify="right", no_wrap=True)
        for label, style, styled, cells in rows:
            side = Text(_shortened(label, side_width))
            side.stylize(style, 0, styled)
            side_by_side.add_row(side, *cells[here])
        parts += [side_by_side, Text()]
    if not found:
        return Group(*parts, Text(text.NOTHING, style="bold green"))
    hint = f"Name one GPU to see what to change, such as --gpu {text.plain(first.gpu)}"
    return Group(*parts, Text(hint, style="dim"))


def _labelled(gap: int = 2, style: str = "dim") -> Table:
    """Rows of a label, or a mark, and what belongs to it."""
    grid = Table.grid(padding=(0, gap, 0, 0))
    grid.add_column(style=style, no_wrap=True)
    grid.add_column()
    return grid


def _flowed(phrases: Sequence[str], width: int) -> str:
    """Phrases with dots between them, broken between phrases only."""
    lines = [""]
    for phrase in phrases:
        longer = f"{lines[-1]} · {phrase}" if lines[-1] else phrase
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(phrase)
    return "\n".join(filter(None, lines))


def _shortened(text: str, width: int) -> str:
    """The text with its middle left out where it is too long: both ends of a path say something."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"
