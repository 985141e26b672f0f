"""What an operation costs on a GPU: predicted time, what bounds it, and how sure that is."""

from tilefit.cost.estimate import MATH, MEASURED, MEMORY, Estimate, StepEstimate
from tilefit.cost.explain import explain
from tilefit.cost.fusion import fuse
from tilefit.cost.model import estimate
from tilefit.cost.step import estimate_step, step_s

__all__ = [
    "MATH",
    "MEASURED",
    "MEMORY",
    "Estimate",
    "StepEstimate",
    "estimate",
    "estimate_step",
    "explain",
    "fuse",
    "step_s",
]
