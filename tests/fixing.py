"""Models with every fix there is, whether it pays or not, at any size."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

import tilefit
from tilefit.fixes import Edits, Plan
from tilefit.fixes.linear import on_any_rows


def fixed(model: nn.Module, inputs: Any, **options: Any) -> Plan:
    """The plan of a copy of the model in which every candidate is applied, and works on few rows too."""
    options = {"gpu": "h200", "amp": "bf16", "optimizer": "none", "min_gain": -1e9, **options}
    plan = tilefit.optimize(copy.deepcopy(model), inputs, **options)
    on_any_rows(plan.model, Edits())
    return plan
