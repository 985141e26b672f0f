"""What an operation costs on a GPU: predicted time, what bounds it, and how sure that is."""

from tilefit.cost.cudnn import cudnn_algorithm
from tilefit.cost.estimate import (
    DATASHEET,
    ESTIMATED,
    LATENCY,
    LAUNCH,
    MATH,
    MEASURED,
    MEMORY,
    Estimate,
    StepEstimate,
)
from tilefit.cost.explain import GemmExplanation, explain
from tilefit.cost.fusion import fuse
from tilefit.cost.model import estimate
from tilefit.cost.step import estimate_step

__all__ = [
    "DATASHEET",
    "ESTIMATED",
    "LATENCY",
    "LAUNCH",
    "MATH",
    "MEASURED",
    "MEMORY",
    "Estimate",
    "GemmExplanation",
    "StepEstimate",
    "cudnn_algorithm",
    "estimate",
    "estimate_step",
    "explain",
    "fuse",
]
