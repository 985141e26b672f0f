"""``tilefit rules``: the list of all rules."""

from __future__ import annotations

from tilefit.cli import output


def rules() -> None:
    """List the rules: of check, and of precision (AMP)."""
    from rich.text import Text

    from tilefit.precision.rules import all_rules as all_precision_rules
    from tilefit.rules import all_rules
    from tilefit.rules.registry import Titled

    every: tuple[Titled, ...] = (*all_rules(), *all_precision_rules())
    table = output.table("", "")
    for rule in every:
        table.add_row(Text(rule.code, style="bold"), Text(rule.title))
    output.stdout().print(table)
