"""Models with every fix there is, whether it pays or not, at any size."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

import tilefit
from tilefit.fixes import Plan
from tilefit.fixes.changes.behaviour import changes


def fixed(model: nn.Module, inputs: Any, **options: Any) -> Plan:
    """The plan of a copy of the model in which every candidate is applied, and works on few rows too."""
    options = {"gpu": "h200", "amp": "bf16", "optimizer": "none", "min_gain": -1e9, **options}
    plan = tilefit.optimize(copy.deepcopy(model), inputs, **options)
    for changed in map(changes, plan.model.modules()):
        if changed is not None:
            changed.behaviours = tuple(
                replace(each, least_rows=0)  # type: ignore[type-var]
                if hasattr(each, "least_rows")
                else each
                for each in changed.behaviours
            )
    return plan
