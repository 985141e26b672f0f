"""Models with every fix there is, whether it pays or not, at any size."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

import tilefit
from tilefit.fixes import Plan
from tilefit.fixes.changes.behaviour import changes
from tilefit.fixes.kinds.padding.layers import CONVOLUTIONS, Fitted, refitted


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


def fitted(model: nn.Module, sizes: Mapping[int, int], inputs: Mapping[int, int]) -> dict[str, Fitted]:
    """What every convolution does, by path, so that these numbers of channels are padded."""
    whole = [(path, m) for path, m in model.named_modules() if type(m) in CONVOLUTIONS and m.groups == 1]
    found = {path: refitted(module, sizes, inputs) for path, module in whole}  # type: ignore[arg-type]
    return {path: wide for path, wide in found.items() if wide is not None}
