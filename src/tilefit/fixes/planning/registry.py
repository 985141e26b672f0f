"""Which fixes there are: each :class:`~tilefit.fixes.changes.fix.Fix` in a module of ``kinds``."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterable
from functools import cache
from importlib import import_module

from tilefit.errors import UsageError, near
from tilefit.fixes import kinds
from tilefit.fixes.changes.fix import Fix
from tilefit.rules import all_rules


@cache
def all_fixes() -> tuple[Fix, ...]:
    """Every fix, by name."""
    fixes: dict[str, Fix] = {}
    for info in pkgutil.walk_packages(kinds.__path__, f"{kinds.__name__}."):
        module = import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, Fix):
                assert value.name not in fixes, f"two fixes are called {value.name}"
                fixes[value.name] = value
    return tuple(fixes[name] for name in sorted(fixes))


def select(select: Collection[str] = (), ignore: Collection[str] = ()) -> tuple[Fix, ...]:
    """The fixes named by ``select`` (all if empty) and not by ``ignore``: their names, or codes of the rules
    they answer or the beginnings of such codes.

    Raises:
        UsageError: a name fits no fix.
    """
    wanted, unwanted = ({fix for word in words for fix in _fitting(word)} for words in (select, ignore))
    return tuple(fix for fix in all_fixes() if (fix in wanted or not select) and fix not in unwanted)


def codes_of(words: Iterable[str]) -> tuple[str, ...]:
    """Codes of rules, or their beginnings, with the rules that a fix answers in place of its name."""
    rules = {fix.name: fix.rules for fix in all_fixes()}
    return tuple(code for word in words for code in rules.get(word.lower(), (word,)))


def _fitting(word: str) -> list[Fix]:
    found = [
        fix
        for fix in all_fixes()
        if fix.name == word.lower() or any(code.startswith(word.upper()) for code in fix.rules)
    ]
    if not found and not (word and any(rule.code.startswith(word.upper()) for rule in all_rules())):
        names = [fix.name for fix in all_fixes()]
        hint = near(word.lower(), names, f"There are {', '.join(names)}.")
        raise UsageError(f"no fix is called {word!r}", hint=hint)
    return found
