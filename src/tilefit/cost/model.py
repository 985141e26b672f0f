"""The one entry: an operation and a GPU in, a predicted time out."""

from __future__ import annotations

from collections.abc import Iterable

from tilefit import gpus
from tilefit.cost.analytic import analytic
from tilefit.cost.calibrated import Profile
from tilefit.cost.estimate import Estimate
from tilefit.cost.lookup import profile
from tilefit.cost.streaming import traffic, with_work
from tilefit.gpus import Gpu
from tilefit.ops import Op

#: Estimates made so far; forgotten all at once when there are too many.
_KNOWN: dict[tuple[Op, Gpu, Profile | None], Estimate] = {}
_MOST_KNOWN = 200_000


def estimate(op: Op, gpu: Gpu | str) -> Estimate:
    """Predicted time of an operation on a GPU, with an interval and the reason.

    Args:
        op: What is executed.
        gpu: A GPU, or its name.

    Raises:
        UsageError: no GPU has this name.
        TilefitError: the GPU's profile is damaged.
        TypeError: the operation is of a kind the model does not know.
    """
    device = gpus.get(gpu) if isinstance(gpu, str) else gpu
    known = _KNOWN.get((op, device, profile(device)))
    return known if known is not None else estimate_all((op,), device)[0]


def estimate_all(ops: Iterable[Op], gpu: Gpu) -> list[Estimate]:
    """Predicted times of many operations; equal ones are priced once, and those of a kind together."""
    fitted = profile(gpu)
    keys = [(op, gpu, fitted) for op in ops]
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    new = {key[0]: None for key in keys if key not in _KNOWN}
    covered: dict[str, list[Op]] = {}
    for op in new:
        _KNOWN[op, gpu, fitted] = analytic(traffic(op), gpu, fitted.constants if fitted else None)
        if fitted is not None and fitted.covers(traffic(op)):
            covered.setdefault(op.kind, []).append(op)
    for together in covered.values():
        assert fitted is not None
        first = [_KNOWN[op, gpu, fitted] for op in together]
        moved = [traffic(op) for op in together]
        for op, corrected in zip(together, fitted.correct(moved, gpu, first), strict=True):
            _KNOWN[op, gpu, fitted] = corrected
    for op in new:
        _KNOWN[op, gpu, fitted] = with_work(op, _KNOWN[op, gpu, fitted], gpu)
    return [_KNOWN[key] for key in keys]
