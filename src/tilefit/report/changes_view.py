"""The changes between two reports: for people, as Markdown, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tilefit import units
from tilefit.console import table
from tilefit.formats import renders
from tilefit.report import markdown, text
from tilefit.report.changes import Changes, ChangesOnGpus, OpChange
from tilefit.report.markdown import Part, escape
from tilefit.report.report import Report
from tilefit.rules.finding import Finding

#: Version of the JSON form.
SCHEMA = 1
SAME = "The two are the same."
#: A change of an operation below this share of the step is not listed unless all are asked for.
_MATTERS = 0.001

#: What is compared of the step, by label.
_FACTS: tuple[tuple[str, Callable[[Report], float | None], Callable[[float], str]], ...] = (
    ("time", lambda r: r.step.time_s, units.seconds),
    ("time a sample", lambda r: r.step.time_s / r.batch if r.batch else None, units.seconds),
    ("GPU busy", lambda r: r.step.gpu_time_s, units.seconds),
    ("host", lambda r: r.step.host_time_s, units.seconds),
    ("rate", lambda r: r.step.flop_per_s, units.rate),
    ("memory", lambda r: r.step.memory_bytes, units.capacity),
    ("largest batch", lambda r: r.step.largest_batch, lambda value: f"{value:.0f}"),
)


@renders(ChangesOnGpus, "text")
def terminal(every: ChangesOnGpus, *, limit: int = 0) -> RenderableType:
    """The changes for a terminal, at most ``limit`` rows of operations for each GPU; 0 is all."""
    parts: list[RenderableType] = []
    for each in every:
        parts.append(Text(_heading(each), style="bold"))
        parts += [*(Text(line, style="dim") for line in each.settings), Text()]
        facts = (map(Text, row) for row in _facts(each))
        parts += [table("", ">A", ">B", ">B / A", rows=facts), Text()]
        if each.ops:
            shown = _shown(each, limit)
            rows = (map(Text, _cells(op)) for op in shown)
            parts += [table(">B - A", ">A", ">B", "operation", "why", rows=rows), Text()]
            parts += [Text(f"{_rest(each.ops[len(shown) :])}: add --limit 0", style="dim"), Text()] * (
                len(shown) < len(each.ops)
            )
        parts += [Text(line) for line in _findings(each)]
        if not each.ops:
            parts.append(Text(SAME, style="bold green"))
    return Group(*parts)


@renders(ChangesOnGpus, "markdown")
def as_markdown(every: ChangesOnGpus, *, limit: int = 0) -> str:
    """The changes for a pull request, as short as any report in Markdown."""
    parts: list[Part] = []
    for each in every:
        parts.append(Part(f"# {escape(_heading(each))}", noun="the heading"))
        if each.settings:
            parts.append(Part(" · ".join(map(escape, each.settings)), noun="the settings"))
        parts.append(markdown.table(["", "A", "B", "B / A"], list(_facts(each)), "rows of figures"))
        found = "\n".join(f"- {escape(line)}" for line in _findings(each))
        parts += [Part(found, noun="the findings")] if found else []
        rows = [[*cells[:3], *map(escape, cells[3:])] for cells in map(_cells, _shown(each, limit))]
        header = ["B - A", "A", "B", "operation", "why"]
        if rows:
            parts.append(markdown.table(header, rows, "operations", "## Operations\n\n"))
        else:
            parts.append(Part(SAME, noun="the verdict"))
        if rest := each.ops[len(rows) :]:
            parts.append(Part(f"{_rest(rest)}.", noun="the other operations"))
    return markdown.page(parts)


@renders(ChangesOnGpus, "json")
def as_json(every: ChangesOnGpus) -> str:
    """The changes as JSON text; the reports themselves are not in it."""

    def side(report: Report) -> dict[str, Any]:
        return {"model": report.model, "gpu": report.gpu, "batch": report.batch, "step": asdict(report.step)}

    data = {
        "schema_version": SCHEMA,
        "changes": [
            {
                "first": side(each.first),
                "second": side(each.second),
                "settings": each.settings,
                "ops": [asdict(op) for op in each.ops],
                "gone": [asdict(finding) for finding in each.gone],
                "new": [asdict(finding) for finding in each.new],
            }
            for each in every
        ],
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


# ---- the words ---------------------------------------------------------------------------------


def _heading(each: Changes) -> str:
    ratio = each.second.step.time_s / each.first.step.time_s
    verdict = "as fast as" if round(ratio, 2) == 1 else f"{units.number(max(ratio, 1 / ratio))} times as "
    verdict += "" if round(ratio, 2) == 1 else ("slow as" if ratio > 1 else "fast as")
    return f"B is {verdict} A: {text.heading(each.second)} on {text.plain(each.second.device.title)}"


def _facts(each: Changes) -> Iterator[list[str]]:
    for label, value, shown in _FACTS:
        before, after = value(each.first), value(each.second)
        if label == "time a sample" and each.first.batch == each.second.batch:
            continue
        if before is not None and after is not None:
            yield [label, shown(before), shown(after), f"{after / before:.3f}" if before else ""]


def _cells(op: OpChange) -> list[str]:
    what = op.second or op.first
    times = f"{op.count} x " if op.count > 1 else ""
    where = f" {op.module}" if op.module.strip("*") else ""
    return [
        f"{'+' if op.slower_s > 0 else '-'}{units.seconds(abs(op.slower_s))}",
        units.seconds(op.first_s) if op.first else "",
        units.seconds(op.second_s) if op.second else "",
        f"{times}{what} {text.PHASES.get(op.phase, op.phase)}{where}",
        ", ".join(op.reasons),
    ]


def _shown(each: Changes, limit: int) -> Sequence[OpChange]:
    """The first operations; without those that hardly matter, unless all are wanted."""
    if not limit:
        return each.ops
    least_s = _MATTERS * max(each.first.step.time_s, each.second.step.time_s)
    return [op for op in each.ops[:limit] if abs(op.slower_s) >= least_s]


def _rest(ops: Sequence[OpChange]) -> str:
    slower_s = sum(op.slower_s for op in ops)
    return f"{len(ops)} more, together {'+' if slower_s > 0 else '-'}{units.seconds(abs(slower_s))}"


def _findings(each: Changes) -> Iterator[str]:
    for word, findings in (("Gone", each.gone), ("New", each.new)):
        yield from (f"{word}: {_finding(finding)}" for finding in findings)


def _finding(finding: Finding) -> str:
    return f"{finding.code} {text.site(finding)} {text.gain(finding)}"
