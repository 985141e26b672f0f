"""Fixes: change a model so that it runs faster, and prove that it is the same function."""

from tilefit.fixes import table  # noqa: F401 - which shows plans
from tilefit.fixes.fix import Candidate, Context, Fix, Refusal, RefusedError, Undo
from tilefit.fixes.plan import AppliedFix, Plan, RefusedFix
from tilefit.fixes.planner import optimize
from tilefit.fixes.registry import all_fixes
from tilefit.fixes.run import Run
from tilefit.fixes.verification import Difference, Verification, verify

__all__ = [
    "AppliedFix",
    "Candidate",
    "Context",
    "Difference",
    "Fix",
    "Plan",
    "Refusal",
    "RefusedError",
    "RefusedFix",
    "Run",
    "Undo",
    "Verification",
    "all_fixes",
    "optimize",
    "verify",
]
