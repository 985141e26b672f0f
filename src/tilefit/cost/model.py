"""The one entry: an operation and a GPU in, a predicted time out."""

from __future__ import annotations

from collections.abc import Iterable

from tilefit.cost.analytic import analytic
from tilefit.cost.estimate import Estimate
from tilefit.cost.priced import PricedGpu, priced
from tilefit.cost.streaming import traffic, with_work
from tilefit.cost.transfer import transferred
from tilefit.gpus import Gpu
from tilefit.ops import Op

#: Estimates made so far; forgotten all at once when there are too many.
_KNOWN: dict[tuple[Op, PricedGpu], Estimate] = {}
_MOST_KNOWN = 200_000


def estimate(op: Op, gpu: Gpu | str) -> Estimate:
    """Predicted time of an operation on a GPU, with an interval and the reason.

    Args:
        op: What is executed.
        gpu: A GPU, or its name.

    Raises:
        UsageError: no GPU has this name.
        TilefitError: the GPU's calibration is damaged.
        TypeError: the operation is of a kind the model does not know.
    """
    device = priced(gpu)
    known = _KNOWN.get((op, device))
    return known if known is not None else estimate_all((op,), device)[0]


def estimate_all(ops: Iterable[Op], gpu: Gpu) -> list[Estimate]:
    """Predicted times of many operations; equal ones are priced once, and those of a kind together."""
    device = priced(gpu)
    calibration = device.calibration
    keys = [(op, device) for op in ops]
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    new = {key[0]: None for key in keys if key not in _KNOWN}
    covered: dict[str, list[Op]] = {}
    for op in new:
        moved = traffic(op)
        _KNOWN[op, device] = analytic(moved, device, device.constants)
        if device.covers(moved):
            covered.setdefault(op.kind, []).append(op)
    for together in covered.values():
        assert calibration is not None
        of = device.donor or device
        described = [traffic(op) for op in together]
        fitted = calibration.kind_constants.get(described[0].kind, of.constants)
        first = [analytic(op, of, fitted) for op in described]
        corrected = calibration.correct(described, of, first)
        if of is not device:
            pairs = zip(described, corrected, strict=True)
            corrected = [transferred(op, theirs, of, device.as_measured) for op, theirs in pairs]
        for op, better in zip(together, corrected, strict=True):
            _KNOWN[op, device] = better
    for op in new:
        _KNOWN[op, device] = with_work(op, _KNOWN[op, device], device)
    return [_KNOWN[key] for key in keys]
