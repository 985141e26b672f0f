"""``tilefit rule``: the page of one rule."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from tilefit.cli import output
from tilefit.cli.completion import rule_codes
from tilefit.cli.rules import every_rule


def rule(
    code: Annotated[
        str,
        typer.Argument(metavar="CODE", help="Such as ALN002.", show_default=False, autocompletion=rule_codes),
    ],
) -> None:
    """Explain a rule: what it sees, why it costs time, the arithmetic, an example, the source."""
    from tilefit.rules.registry import pick

    found = pick(code, every_rule())
    page = f"# {found.code}: {found.title}\n\n{inspect.getdoc(type(found))}"
    console = output.stdout()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(page), width=min(console.width, 100))
    else:
        print(page)
