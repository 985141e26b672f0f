"""Models with odd channels, as they are and with all of these padded, whatever the price says of it; and in
NHWC. Each function returns a model and its inputs.

What a fix would choose by itself is another matter (``rare_fixes.py``): these tell what padding does to a
compiled step.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import torch
from rare_fixes import CASES
from torch import nn
from whole_steps import EXAMPLES

from tilefit.capture.targets import load
from tilefit.cost.priced import priced
from tilefit.cost.step import estimate_step
from tilefit.fixes.changes.fix import ChangeSet, Context
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.padding.channels import pad_channels
from tilefit.fixes.kinds.padding.channels_last import run_channels_last
from tilefit.options import StepOptions, TargetOptions

Made = tuple[nn.Module, Any]
FIXES = {"padded": pad_channels, "last": run_channels_last}


def made(name: str, fixes: tuple[str, ...]) -> Made:
    """A model with the first change of each of these fixes."""
    if name == "odd_cnn":
        loaded = load(f"{EXAMPLES}:odd_cnn", TargetOptions(on_cpu=True))
        model, inputs = loaded.model, torch.randn(loaded.inputs[0].shape)
    else:
        make, sizes, *_ = CASES[name]
        model, inputs = make(), torch.randn(sizes)
    # Found as if it were not compiled: padding beside depthwise convolutions is refused where it is.
    likeness, options = copy.deepcopy(model).to("meta"), StepOptions(amp="bf16")
    for fix in fixes:
        run = Run(likeness, inputs.to("meta"), options)
        step, gpu = run.capture(), priced("h100-sxm")
        context = Context(step, gpu, estimate_step(step, gpu), run)
        change = next(each for each in FIXES[fix].find(context) if isinstance(each, ChangeSet))
        change.apply(run)
        change.apply(Run(model, inputs, options))
    return model, (inputs,)


for _name in ("unet", "separable", "dense", "odd_cnn"):
    for _fixes in ((), ("padded",), ("last",), ("padded", "last")):
        setattr(sys.modules[__name__], "_".join((_name, *_fixes)), partial(made, _name, _fixes))
