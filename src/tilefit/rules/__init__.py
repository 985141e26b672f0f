"""Rules: what wastes the GPU in a step, and what changing it is worth."""

from tilefit.rules.base import Case, Change, Context, Place, Proposal, Rule
from tilefit.rules.engine import combinations, find, run, safe_gain_s
from tilefit.rules.finding import Finding
from tilefit.rules.registry import all_rules, get, select

__all__ = [
    "Case",
    "Change",
    "Context",
    "Finding",
    "Place",
    "Proposal",
    "Rule",
    "all_rules",
    "combinations",
    "find",
    "get",
    "run",
    "safe_gain_s",
    "select",
]
