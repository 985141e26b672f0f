"""A short lesson on an operation, a layer or a finding of a report: the arithmetic in steps, on its sizes.

Tiles and waves, alignment and arithmetic intensity as the guides teach them: NVIDIA, "Matrix Multiplication
Background User's Guide" and "GPU Performance Background User's Guide"; S. Williams et al., "Roofline",
CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil

from tilefit import units
from tilefit.cost import tiles
from tilefit.errors import UsageError, near
from tilefit.formats import render, renders
from tilefit.ops.dtypes import size_bytes
from tilefit.report import text
from tilefit.report.report import Device, OpRow, Report
from tilefit.report.roof import floor_s, peak_dtype, peaks
from tilefit.report.text import OpGroup
from tilefit.rules.finding import Finding

#: Cells of the drawn result, down and across; a cell stands for several tiles where there are more.
_CELLS = (10, 54)
#: Characters of one tile where there are few.
_TILE_WIDTH = 6
_BAR_WIDTH = 36
#: Operations that are listed of a layer.
_LISTED = 6

_LAYOUTS = {
    "TN": "F.linear's forward: each row of A, and of the weight, lies along k",
    "NN": "a data gradient: A lies along k, B along n",
    "NT": "a weight gradient: A and B lie across k",
    "TT": "A lies across k, B along it",
}
_BOUNDS = {
    "math": "the arithmetic units are busy",
    "memory": "they wait for bytes",
    "latency": "too little runs at once to fill the GPU, or starting and ending it takes the time",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a lesson; ``picture``: lines to be shown as they are, before the words."""

    title: str
    lines: tuple[str, ...]
    picture: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is taught on one thing; ``title`` says of what."""

    title: str
    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


@renders(Lesson, "text")
def _text(lesson: Lesson) -> object:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts = [Text(text.plain(lesson.title), "bold")]
    for number, stage in enumerate(lesson.stages, 1):
        parts += [Text(), Text(f"{number}  {text.plain(stage.title)}", "bold cyan")]
        parts += [Padding(Text(line, no_wrap=True), (0, 0, 0, 3)) for line in stage.picture]  # type: ignore[misc]
        parts += [Padding(Text(text.plain(line)), (0, 0, 0, 3)) for line in stage.lines]  # type: ignore[misc]
    return Group(*parts)


@renders(Lesson, "markdown")
def _markdown(lesson: Lesson) -> str:
    from tilefit.report.markdown import escape

    parts = [f"# {escape(lesson.title)}"]
    for number, stage in enumerate(lesson.stages, 1):
        parts.append(f"## {number}. {escape(stage.title)}")
        if stage.picture:
            parts.append("\n".join(("```text", *stage.picture, "```")))
        parts.append("  \n".join(map(escape, stage.lines)))
    return "\n\n".join(parts) + "\n"


def explain(report: Report, what: str = "") -> Lesson:
    """The lesson on a part of a report.

    Args:
        report: Of a step on a GPU.
        what: The code of a finding (``ALN002``), a module (``lm_head``, ``h.*.mlp``, with what is in it), a
            kind of operation (``gemm``), or the number of an operation (``#12``, counted from 0); empty:
            what takes the most time.

    Raises:
        UsageError: the report has no such thing.
    """
    if not report.ops:
        raise UsageError("there are no operations in the report", where=report.model)
    found = [each for each in report.findings if each.code == what.upper()]
    if found:
        return _of_finding(report, found[0])
    groups = text.grouped(_chosen(report, what))
    device = report.device
    title = f"{what or 'What takes the most time'} in {text.heading(report)} on {device.title}"
    listed = [_listed(report, groups)] if len(groups) > 1 else []
    return Lesson(title, (*listed, *_stages(report, groups[0])))


def _chosen(report: Report, what: str) -> Sequence[OpRow]:
    if what.startswith("#"):
        if not (what[1:].isdecimal() and int(what[1:]) < len(report.ops)):
            raise UsageError(
                f"there is no operation {what}", hint=f"Take one of #0 to #{len(report.ops) - 1}."
            )
        return report.ops[int(what[1:]) :][:1]
    found = _within(report, what) or [op for op in report.ops if op.kind == what]
    if found:
        return found
    codes = [each.code for each in report.findings]
    words = [*codes, *{op.module for op in report.ops}, *{op.kind for op in report.ops}]
    otherwise = f"Name one of {', '.join(codes)}; or a module, or a kind of operation." if codes else ""
    raise UsageError(f"nothing in the report is called {what!r}", hint=near(what, words, otherwise))


def _within(report: Report, module: str) -> list[OpRow]:
    """The operations of a module and of those inside it; of all of them without one."""
    return [op for op in report.ops if not module or _is_within(op.module, module)]


def _is_within(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _listed(report: Report, groups: Sequence[OpGroup]) -> Stage:
    """What there is, by time."""
    total_s = sum(group.time_s for group in groups)
    lines = [
        f"{units.seconds(group.time_s)}  {text.op_label(group.op)}, {text.PHASES[group.op.phase]}"
        f"{f', {group.count} times' if group.count > 1 else ''}: limited by {group.op.bound}"
        for group in groups[:_LISTED]
    ]
    share = units.share(total_s / (report.step.gpu_time_s or 1.0))
    more = f", the {_LISTED} that take most" if len(groups) > _LISTED else ""
    head = f"{units.counted(sum(group.count for group in groups), 'operation')}, {share} of the GPU's time"
    return Stage(f"What runs: {head}{more}", tuple(lines))


def _of_finding(report: Report, finding: Finding) -> Lesson:
    """What was found, then the longest operation of the place: of the line it names, if any is there."""
    page = next((page for page in report.rules if page.code == finding.code), None)
    first = Stage(
        page.title if page else "What was found",
        (
            f"{text.site(finding)} {finding.source}".rstrip(),
            finding.message,
            *finding.arithmetic,
            text.gain(finding) + (f": {text.likely(finding)}, 80 %" if finding.gain_s else ""),
            f"→ {finding.fix} ({finding.safety})",
        ),
    )
    there = _within(report, finding.module)
    groups = text.grouped([op for op in there if op.source == finding.source] or there)
    stages = _stages(report, groups[0], findings=False) if groups else ()
    why = Stage("Why: the rule's own words", (f"tilefit rule {finding.code}",))
    return Lesson(f"{finding.code} in {text.heading(report)} on {report.device.title}", (first, *stages, why))


def _stages(report: Report, group: OpGroup, *, findings: bool = True) -> Iterator[Stage]:
    """An operation: what it has to do, what limits it, how it is cut up, what is left to gain."""
    op, device = group.op, report.device
    yield Stage(f"The operation: {text.op_label(op)}", tuple(_what(group)))
    yield Stage("The least time", tuple(_least(op, device)))
    if op.product and op.tile and op.waves and device.sms:
        yield _tiled(op, device)
    yield Stage("The time that is predicted", tuple(_predicted(report, group)))
    if findings:
        yield Stage("What to do", tuple(_advice(report, op)))
    yield Stage(
        "Sources",
        (
            f"times: {text.times(report.step.provenance, report.profile)}; peaks: tilefit gpu {report.gpu}",
            "tiles, waves, alignment: NVIDIA, Matrix Multiplication Background User's Guide",
            "intensity: NVIDIA, GPU Performance Background; Williams et al., Roofline, CACM 2009",
        ),
    )


def _what(group: OpGroup) -> Iterator[str]:
    op = group.op
    place = f"{op.module or 'the whole step'} {op.source}".rstrip()
    others = f" (in {group.module})" if group.module else ""
    more = f", one of {group.count} alike{others}" if group.count > 1 else ""
    yield f"{place}, {op.phase}{more}"
    if op.product:
        m, n, k, batch = op.product
        of = f", {batch} of them" if batch > 1 else ""
        yield f"C[{m}, {n}] = A[{m}, {k}] · B[{k}, {n}]{of}, elements of {op.dtype}"
    if op.layout:
        yield f"{op.layout}, in the letters of BLAS: {_LAYOUTS[op.layout]}"


def _least(op: OpRow, device: Device) -> Iterator[str]:
    dtype = peak_dtype(op, device)
    peak, bandwidth = peaks(device)[dtype], device.memory_bandwidth_bytes_per_s
    work = units.flop(op.flop)
    if op.product:
        m, n, k, batch = op.product
        factors = f"2 · {m} · {n} · {k}" + (f" · {batch}" if batch > 1 else "")
        work = f"{factors} = {work}" if 2 * m * n * k * batch == op.flop else work
    yield f"arithmetic: {work}; at the {dtype} peak, {units.rate(peak)}: {units.seconds(op.flop / peak)}"
    yield (
        f"bytes: {_bytes(op)}; at the memory's {units.size(bandwidth)}/s: "
        f"{units.seconds(op.moved_bytes / bandwidth)}"
    )
    if op.flop and op.moved_bytes:
        here, needed = op.flop / op.moved_bytes, peak / bandwidth
        side = "more: arithmetic is the limit" if here >= needed else "less: memory is the limit"
        yield (
            f"intensity: {units.number(here)} FLOP per byte, where {units.rate(peak)} over "
            f"{units.size(bandwidth)}/s is {units.number(needed)}; it has {side}"
        )
    yield f"so at best {units.seconds(floor_s(op, device))}"


def _bytes(op: OpRow) -> str:
    if op.product:
        m, n, k, batch = op.product
        parts = [units_ * size_bytes(op.dtype) * batch for units_ in (m * k, k * n, m * n)]
        if sum(parts) == op.moved_bytes:
            named = zip("ABC", parts, strict=True)
            return " + ".join(f"{name} {units.size(part)}" for name, part in named) + (
                f" = {units.size(op.moved_bytes)}"
            )
    return f"{units.size(op.moved_bytes)} read and written, each once"


def _tiled(op: OpRow, device: Device) -> Stage:
    """The tiles of the result, and the waves they run in."""
    assert op.product
    assert op.tile
    assert op.waves
    m, n, _, batch = op.product
    a, b = op.tile
    down, across = tiles.ceil_div(m, a), tiles.ceil_div(n, b)
    count, blocks = tiles.count(m, n, op.tile, batch), round(op.waves * device.sms)
    split = max(1, round(blocks / count))
    turns = ceil(blocks / device.sms)
    last = blocks - (turns - 1) * device.sms
    product = f"{down:,} x {across:,}" + (f" x {batch:,}" if batch > 1 else "")
    lines = [
        f"a thread block computes {a} x {b} of C: ⌈{m} / {a}⌉ x ⌈{n} / {b}⌉ = {product} = "
        f"{units.counted(count, 'tile')}",
        f"{units.share(tiles.tile_efficiency(m, n, op.tile))} of what they compute is wanted",
        *([f"the contraction of each is split over {split} blocks"] if split > 1 else []),
        f"{blocks:,} blocks over {device.sms} SMs are {blocks / device.sms:.2f} waves, which take the time "
        f"of {turns:,}: the last one keeps {last} SMs busy",
    ]
    return Stage(
        "How it is cut up",
        tuple(lines),
        (*_drawn(m, n, (a, b), device.sms, split), *_bars(turns, last, device)),
    )


def _drawn(m: int, n: int, tile: tuple[int, int], sms: int, split: int) -> Iterator[str]:
    """C in tiles, in reading order: every other wave in another shade, the last one light."""
    down, across = tiles.ceil_div(m, tile[0]), tiles.ceil_div(n, tile[1])
    rows, columns = min(down, _CELLS[0]), min(across, _CELLS[1])
    wide = max(1, min(_TILE_WIDTH, _CELLS[1] // columns))
    last = (down * across * split - 1) // sms
    edge = f"n = {n}"
    yield f"{edge:>{len(str(m)) + 5 + len(edge)}}"
    for row in range(rows):
        label = f"m = {m}" if row == 0 else ""
        cells = ""
        for column in range(columns):
            at = _nth(row, rows, down) * across + _nth(column, columns, across)
            wave = at * split // sms
            over = (column == columns - 1 and n % tile[1]) or (row == rows - 1 and m % tile[0])
            mark = "░" if wave == last else "█▓"[wave % 2]
            cells += mark * (wide - 1) + ("×" if over else mark)
        yield f"{label:<{len(str(m)) + 5}}{cells}"
    yield "█▓ waves in turn, in reading order  ░ the last one  × reaches beyond C"
    if down > rows or across > columns:
        yield f"{rows} of {down} rows of tiles, {columns} of {across} columns are drawn"


def _nth(index: int, of: int, many: int) -> int:
    """Which of ``many`` is drawn as the ``index``-th ``of`` some: the first and the last are among them."""
    return index * (many - 1) // max(1, of - 1)


def _bars(turns: int, last: int, device: Device) -> Iterator[str]:
    full = "█" * _BAR_WIDTH
    share = max(1, round(_BAR_WIDTH * last / device.sms))
    if turns > 1:
        yield f"{'waves 1 to ' + str(turns - 1) if turns > 2 else 'wave 1':<18}{full} {device.sms} SMs"
    yield f"{'wave ' + str(turns):<18}{'░' * share:<{_BAR_WIDTH}} {last} SMs"


def _predicted(report: Report, group: OpGroup) -> Iterator[str]:
    op, floor = group.op, floor_s(group.op, report.device)
    yield (
        f"{units.seconds(op.time_s)} ({units.interval(op.low_s, op.high_s)}), {op.provenance}, limited by "
        f"{op.bound}: {_BOUNDS.get(op.bound, '')}".rstrip(": ")
    )
    if floor and op.time_s:
        share = units.share(floor / op.time_s)
        yield f"{units.number(op.time_s / floor)} times the least: {share} of what the GPU could"
    if op.kernel_family:
        reason = text.because(op.kernel_family, op.reason)
        yield f"kernels: {op.kernel_family}{': ' + reason if reason else ''}"
    many = f"{group.count} of them: {units.seconds(group.time_s)}, " if group.count > 1 else ""
    yield f"{many}{units.share(group.time_s / (report.step.gpu_time_s or 1.0))} of the GPU's time in a step"


def _advice(report: Report, op: OpRow) -> Iterator[str]:
    """The findings of the place, else what to try."""
    here = [each for each in report.findings if each.module and _is_within(op.module, each.module)]
    found = here + [each for each in report.findings if not each.module][:1]
    for each in found[:3]:
        yield f"{each.code} {text.gain(each)}: {each.fix}"
    if not found:
        yield "Nothing was found to change here."
    if op.kind == "gemm" and op.product and op.product[3] == 1:
        m, n, k, _ = op.product
        options = f"--layout {op.layout} --dtype {op.dtype} --gpu {report.gpu}"
        yield f"other sizes and layouts: tilefit gemm {m} {n} {k} {options}"
