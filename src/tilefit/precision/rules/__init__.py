"""The debugger's rules, by family, found without being listed. Without torch."""

from __future__ import annotations

from functools import cache

from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.registry import discover

__all__ = ["PrecisionRule", "all_rules"]


@cache
def all_rules() -> tuple[PrecisionRule, ...]:
    """Every rule, by code."""
    return discover(PrecisionRule, __name__)  # type: ignore[type-abstract]
