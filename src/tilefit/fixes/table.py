"""A plan as people read it."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilefit import units
from tilefit.fixes.plan import RENDERERS, Plan

NOTHING = "Nothing worth changing."
#: Refusals that are shown; a model with many layers may have one for each.
MOST_REFUSED = 5


def table(plan: Plan) -> RenderableType:
    """The plan for a terminal."""
    parts: list[RenderableType] = []
    if plan.fixes:
        parts += [_headline(plan), Text(), _fixes(plan)]
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
        parts += [Text(), _refused(plan)]
    return Group(*parts)


def text(plan: Plan, width: int = 80) -> str:
    """The plan as plain text of a given width."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(table(plan))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def html(plan: Plan) -> str:
    """The plan for a notebook."""
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(table(plan))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _headline(plan: Plan) -> Text:
    before, after = units.capacity(plan.before_bytes), units.capacity(plan.after_bytes)
    return Text.assemble(
        (f"{plan.speedup:.2f} times as fast", "bold green"),
        f" on {plan.gpu} ({plan.provenance}): {units.seconds(plan.before_s)} -> "
        f"{units.seconds(plan.after_s)} a step",
        f"; memory {before} -> {after}" if before != after else "",
        "; measure=True tells what it is on the GPU here" if plan.is_measurable else "",
    )


def _fixes(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for fix in plan.fixes:
        mark = "" if fix.level == "safe" else f" ({fix.level})"
        gain_s = fix.gain_s if fix.measured_s is None else fix.measured_s
        sign = "+" if gain_s < 0 else "-"  # measured, within the noise, it may be a loss
        grid.add_row(fix.name, f"{sign}{units.seconds(abs(gain_s))}", fix.summary + mark)
    return grid


def _refused(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for refused in plan.refused[:MOST_REFUSED]:
        grid.add_row(f"not {refused.name}", f"{refused.reason}.")
    more = len(plan.refused) - MOST_REFUSED
    if more > 0:
        grid.add_row("", f"and {more} more in plan.refused.")
    return grid


RENDERERS.update(terminal=table, text=text, html=html)
