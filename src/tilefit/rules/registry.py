"""Which rules there are.

A family is a package beside this module, a rule a subclass of :class:`~tilefit.rules.base.Rule` in one of
its modules; a new file is found without being listed anywhere.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from tilefit.errors import UsageError, near
from tilefit.rules.base import Rule
from tilefit.rules.finding import RulePage

_PACKAGE = "tilefit.rules"
_FOLDER = str(Path(__file__).parent)


class Coded(Protocol):
    """What has a code: a rule of any kind."""

    code: ClassVar[str]


class Titled(Coded, Protocol):
    """What has a title as well: a rule with a page."""

    title: ClassVar[str]


_R = TypeVar("_R", bound=Coded)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule about what wastes the GPU, by code."""
    families = [family.name for family in pkgutil.iter_modules([_FOLDER], f"{_PACKAGE}.") if family.ispkg]
    rules = [rule for family in families for rule in discover(Rule, family)]  # type: ignore[type-abstract]
    return tuple(sorted(rules, key=lambda rule: rule.code))


def get(code: str) -> Rule:
    """The rule of a code, in either case (``aln002``).

    Raises:
        UsageError: no rule has this code.
    """
    return pick(code, all_rules())


def select(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules whose code starts with one of ``select`` (all rules if empty) and with none of ``ignore``.

    Raises:
        UsageError: a code or prefix fits no rule.
    """
    return choose(all_rules(), select, ignore)


def discover(base: type[_R], package: str) -> tuple[_R, ...]:
    """One of every concrete subclass of ``base`` in the modules of a package, by code."""
    rules: dict[str, _R] = {}
    for info in pkgutil.iter_modules(import_module(package).__path__, f"{package}."):
        module = import_module(info.name)
        for value in vars(module).values():
            defined_here = inspect.isclass(value) and value.__module__ == module.__name__
            if defined_here and issubclass(value, base) and not inspect.isabstract(value):
                assert value.code not in rules, f"two rules are called {value.code}"
                rules[value.code] = object.__new__(value)  # without what an object of it is about
    return tuple(rules[code] for code in sorted(rules))


def pick(code: str, rules: Sequence[_R]) -> _R:
    """:func:`get` among ``rules``."""
    for rule in rules:
        if rule.code == code.upper():
            return rule
    raise _unknown(code, rules)


def pages(codes: Iterable[str], rules: Iterable[Titled]) -> tuple[RulePage, ...]:
    """The documentation of those of ``rules`` that have one of the codes."""
    wanted = set(codes)
    return tuple(
        RulePage(rule.code, rule.title, inspect.getdoc(type(rule)) or "")
        for rule in rules
        if rule.code in wanted
    )


def choose(rules: Sequence[_R], select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[_R, ...]:
    """:func:`select` among ``rules``."""
    wanted, unwanted = _prefixes(select, rules), _prefixes(ignore, rules)
    return tuple(
        rule
        for rule in rules
        if (not wanted or rule.code.startswith(wanted)) and not rule.code.startswith(unwanted)
    )


def _prefixes(codes: Iterable[str], rules: Sequence[Coded]) -> tuple[str, ...]:
    # A lone text would be taken for a list of one-letter codes, most of which are beginnings of some.
    prefixes = tuple(code.strip().upper() for code in ([codes] if isinstance(codes, str) else codes))
    for prefix in prefixes:
        if not prefix or not any(rule.code.startswith(prefix) for rule in rules):
            raise _unknown(prefix, rules)
    return prefixes


def _unknown(code: str, rules: Sequence[Coded]) -> UsageError:
    codes = [rule.code for rule in rules]
    families = sorted({known[:3] for known in codes})
    if family := [known for known in codes if known[:3] == code[:3].upper()]:
        there = f"There are {', '.join(family)}."
        hint = there if code.upper() in families else near(code.upper(), codes, there)
    else:
        hint = near(code.upper(), codes + families, f"The families are {', '.join(families)}.")
    return UsageError(f"no rule is called {code!r}", hint=hint)
