"""``tilefit rule``: the page of one rule."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from tilefit.cli import output


def rule(
    code: Annotated[str, typer.Argument(metavar="CODE", help="Such as ALN002.", show_default=False)],
) -> None:
    """Explain a rule: what it sees, why it costs time, the arithmetic, an example, the source."""
    from tilefit.precision.rules import all_rules as all_precision_rules
    from tilefit.rules import all_rules
    from tilefit.rules.registry import Titled, pick

    every: tuple[Titled, ...] = (*all_rules(), *all_precision_rules())
    found = pick(code, every)
    page = f"# {found.code}: {found.title}\n\n{inspect.getdoc(type(found))}"
    console = output.stdout()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(page), width=min(console.width, 100))
    else:
        print(page)
