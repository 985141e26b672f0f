"""A plan as people read it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilefit import console, units
from tilefit.fixes.plan import RENDERERS, Plan

NOTHING = "Nothing worth changing."
#: Refusals that are shown; a model with many layers may have one for each.
MOST_REFUSED = 5


def table(plan: Plan) -> RenderableType:
    """The plan for a terminal."""
    parts: list[RenderableType] = []
    if plan.fixes:
        parts += [_headline(plan), Text(), _grid("bold", _fixes(plan))]
        proofs = [plan.verification, plan.on_gpu]
        parts += [
            part
            for proof in proofs
            if proof is not None
            for part in (Text(), Text.assemble(("Proof  ", "dim"), str(proof)))
        ]
    else:
        parts.append(Text(NOTHING, style="bold green"))
    if plan.refused:
        parts += [Text(), _grid("dim", _refused(plan))]
    return Group(*parts)


def text(plan: Plan, width: int = 80) -> str:
    """The plan as plain text of a given width."""
    return console.plain(table(plan), width)


def html(plan: Plan) -> str:
    """The plan for a notebook."""
    page = Console(record=True, file=io.StringIO(), width=100)
    page.print(table(plan))
    return page.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _headline(plan: Plan) -> Text:
    return Text.assemble(
        (f"{plan.speedup:.2f} times as fast", "bold green"),
        f" on {plan.gpu} ({plan.provenance}): {plan.times}",
        "; measure=True tells what it is on the GPU here" if plan.is_measurable else "",
    )


def _fixes(plan: Plan) -> Iterator[tuple[str, ...]]:
    for fix in plan.fixes:
        mark = "" if fix.level == "safe" else f" ({fix.level})"
        sign = "+" if fix.saved_s < 0 else "-"  # measured, within the noise, it may be a loss
        yield fix.name, f"{sign}{units.seconds(abs(fix.saved_s))}", fix.summary + mark


def _refused(plan: Plan) -> Iterator[tuple[str, ...]]:
    for refused in plan.refused[:MOST_REFUSED]:
        yield f"not {refused.name}", f"{refused.reason}."
    more = len(plan.refused) - MOST_REFUSED
    if more > 0:
        yield "", f"and {more} more in plan.refused."


def _grid(style: str, rows: Iterable[tuple[str, ...]]) -> Table:
    """A table whose last column alone is wrapped; ``style``: of the first."""
    grid, (first, *others) = Table.grid(padding=(0, 2, 0, 0)), rows
    for number in range(len(first) - 1):
        grid.add_column(style="" if number else style, no_wrap=True)
    grid.add_column()
    for row in (first, *others):
        grid.add_row(*row)
    return grid


RENDERERS.update(terminal=table, text=text, html=html)
