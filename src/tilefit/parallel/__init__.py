"""One GPU's part of a step that is split over several: tensor, pipeline and data parallelism.

The way a step is split is inferred from what it executes, not read from a framework: see
:mod:`tilefit.parallel.roles`.
"""

from tilefit.parallel.pricing import SplitEstimate, estimate_split, rank_step
from tilefit.parallel.split import SplitStep, split_step

__all__ = ["SplitEstimate", "SplitStep", "estimate_split", "rank_step", "split_step"]
