"""One GPU's part of a step that is split over several: tensor, pipeline and data parallelism.

The way a step is split is inferred from what it executes, not read from a framework: see
:mod:`tilefit.parallel.roles`.
"""

from tilefit.parallel.pricing import SplitEstimate, estimate_plan, rank_step
from tilefit.parallel.split import Plan, plan

__all__ = ["Plan", "SplitEstimate", "estimate_plan", "plan", "rank_step"]
