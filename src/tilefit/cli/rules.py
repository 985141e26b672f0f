"""``tilefit rules``: the list of all rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilefit.cli import output

if TYPE_CHECKING:
    from tilefit.rules.registry import Titled


def every_rule() -> tuple[Titled, ...]:
    """The rules of check and those of precision."""
    from tilefit.precision.rules import all_rules as all_precision_rules
    from tilefit.rules import all_rules

    return *all_rules(), *all_precision_rules()


def rules() -> None:
    """List the rules: of check, and of precision (AMP)."""
    output.stdout().print(output.facts(((rule.code, rule.title) for rule in every_rule()), "bold"))
