"""Which rules there are.

A family is a package beside this module, a rule a subclass of :class:`~tilefit.rules.base.Rule` in one of
its modules; a new file is found without being listed anywhere.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path

from tilefit.errors import UsageError
from tilefit.rules.base import Rule

_PACKAGE = "tilefit.rules"
_FOLDER = str(Path(__file__).parent)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    rules: dict[str, Rule] = {}
    for family in pkgutil.iter_modules([_FOLDER], f"{_PACKAGE}."):
        if not family.ispkg:
            continue
        package = import_module(family.name)
        for info in pkgutil.iter_modules(package.__path__, f"{family.name}."):
            module = import_module(info.name)
            for value in vars(module).values():
                defined_here = inspect.isclass(value) and value.__module__ == module.__name__
                if defined_here and issubclass(value, Rule) and not inspect.isabstract(value):
                    assert value.code not in rules, f"two rules are called {value.code}"
                    rules[value.code] = value()
    return tuple(rules[code] for code in sorted(rules))


def get(code: str) -> Rule:
    """The rule of a code, in either case (``aln002``).

    Raises:
        UsageError: no rule has this code.
    """
    for rule in all_rules():
        if rule.code == code.upper():
            return rule
    raise _unknown(code)


def select(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules whose code starts with one of ``select`` (all rules if empty) and with none of ``ignore``.

    Raises:
        UsageError: a code or prefix fits no rule.
    """
    wanted, unwanted = _prefixes(select), _prefixes(ignore)
    return tuple(
        rule
        for rule in all_rules()
        if (not wanted or rule.code.startswith(wanted)) and not rule.code.startswith(unwanted)
    )


def _prefixes(codes: Iterable[str]) -> tuple[str, ...]:
    prefixes = tuple(code.strip().upper() for code in codes)
    for prefix in prefixes:
        if not prefix or not any(rule.code.startswith(prefix) for rule in all_rules()):
            raise _unknown(prefix)
    return prefixes


def _unknown(code: str) -> UsageError:
    codes = [rule.code for rule in all_rules()]
    families = sorted({known[:3] for known in codes})
    near = get_close_matches(code.upper(), codes + families, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"The families are {', '.join(families)}."
    return UsageError(f"no rule is called {code!r}", hint=hint)
