"""The mixed-precision debugger: is this training silently wrong?

    >>> with tilefit.precision.watch(model, optimizer=optimizer) as w:  # doctest: +SKIP
    ...     train()
    >>> print(w.report())  # doctest: +SKIP

Its parts: trackers (``ledger``, ``window``, ``scalers``, ``autocast``, ``numerics``, ``storage``, ``ranks``)
observe a run and say what happened as plain data; ``rules`` judge the data. Only the trackers import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilefit.precision.replay import check_accumulation, check_resume, compare, first_divergence
    from tilefit.precision.watching import Watch, watch

__all__ = ["Watch", "check_accumulation", "check_resume", "compare", "first_divergence", "watch"]

_HOMES = {name: "watching" if name in ("Watch", "watch") else "replay" for name in __all__}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilefit.precision' has no attribute {name!r}")
    value = getattr(import_module(f"tilefit.precision.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
