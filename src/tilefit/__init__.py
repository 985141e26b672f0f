"""tilefit: where a PyTorch model wastes a GPU, and what each fix is worth.

    >>> import tilefit
    >>> tilefit.estimate(tilefit.ops.Gemm(4096, 4096, 4096), gpu="h200").bound
    'math'

``import tilefit`` is cheap: everything below is imported when it is first used, and only :func:`check`,
:func:`optimize`, :func:`verify` and what is in :mod:`tilefit.nn` ever import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilefit.version import __version__

if TYPE_CHECKING:
    from tilefit import gpus, nn, ops, precision
    from tilefit.cost import Estimate
    from tilefit.cost.model import estimate
    from tilefit.errors import TilefitError
    from tilefit.fixes import Plan, Verification, optimize, strip, verify
    from tilefit.gpus import Gpu
    from tilefit.ops import Step
    from tilefit.profiling import profile
    from tilefit.report import Comparison, Report
    from tilefit.rules import Finding
    from tilefit.session import assess, check

__all__ = [
    "Comparison",
    "Estimate",
    "Finding",
    "Gpu",
    "Plan",
    "Report",
    "Step",
    "TilefitError",
    "Verification",
    "__version__",
    "assess",
    "check",
    "estimate",
    "gpus",
    "nn",
    "ops",
    "optimize",
    "precision",
    "profile",
    "strip",
    "verify",
]

_HOMES = {
    "Comparison": "tilefit.report",
    "Estimate": "tilefit.cost",
    "Finding": "tilefit.rules",
    "Gpu": "tilefit.gpus",
    "Plan": "tilefit.fixes",
    "Report": "tilefit.report",
    "Step": "tilefit.ops",
    "TilefitError": "tilefit.errors",
    "Verification": "tilefit.fixes",
    "assess": "tilefit.session",
    "check": "tilefit.session",
    "load_ipython_extension": "tilefit.cli.notebook",
    "optimize": "tilefit.fixes",
    "strip": "tilefit.fixes",
    "verify": "tilefit.fixes",
    "estimate": "tilefit.cost",
    "profile": "tilefit.profiling",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in ("gpus", "nn", "ops", "precision"):
        value = import_module(f"tilefit.{name}")
    else:
        raise AttributeError(f"module 'tilefit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
