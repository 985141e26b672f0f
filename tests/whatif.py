"""What a rule says a change is worth, and what estimating the changed model itself says."""

from __future__ import annotations

from tilefit.cost import estimate_step
from tilefit.gpus import get
from tilefit.ops import Step
from tilefit.rules import Finding, run


def findings(step: Step, code: str, gpu: str = "h200", min_gain: float = 0.002) -> list[Finding]:
    """The findings of one rule."""
    return run(step, get(gpu), select=[code], min_gain=min_gain)


def saved_s(before: Step, after: Step, gpu: str = "h200") -> float:
    """Predicted time that one captured step takes longer than another."""
    return estimate_step(before, gpu).time_s - estimate_step(after, gpu).time_s
