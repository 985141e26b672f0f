"""Fixes: change a model so that it runs faster, and prove that it is the same function."""

from tilefit.fixes.changes.behaviour import Edits
from tilefit.fixes.changes.fix import ChangeSet, Context, Fix, Refusal, RefusedError, Stage
from tilefit.fixes.changes.run import Run
from tilefit.fixes.planning.plan import AppliedFix, Plan, RefusedFix, strip
from tilefit.fixes.planning.planner import optimize
from tilefit.fixes.planning.registry import all_fixes
from tilefit.fixes.proof.verification import Difference, Verification, verify

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
