"""Fixes: change a model so that it runs faster, and prove that it is the same function."""

from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError, Stage
from tilefit.fixes.plan import AppliedFix, Plan, RefusedFix, strip
from tilefit.fixes.planner import optimize
from tilefit.fixes.registry import all_fixes
from tilefit.fixes.run import Run
from tilefit.fixes.verification import Difference, Verification, verify

__all__ = [
    "AppliedFix",
    "ChangeSet",
    "Context",
    "Difference",
    "Edits",
    "Fix",
    "Plan",
    "Refusal",
    "RefusedError",
    "RefusedFix",
    "Run",
    "Stage",
    "Verification",
    "all_fixes",
    "optimize",
    "strip",
    "verify",
]
