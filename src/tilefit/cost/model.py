"""The one entry: an operation and a GPU in, a predicted time out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilefit.cost.analytic import analytic
from tilefit.cost.constants import Constants
from tilefit.cost.conv import with_bias, with_large_filter
from tilefit.cost.estimate import Estimate
from tilefit.cost.priced import PricedGpu, priced
from tilefit.cost.rows import with_rows
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
    return estimate_all((op,), priced(gpu))[0]


def estimate_all(ops: Iterable[Op], gpu: Gpu) -> list[Estimate]:
    """Predicted times of many operations; equal ones are priced once, and those of a kind together."""
    device = priced(gpu)
    keys = [(op, device) for op in ops]
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    new = list(dict.fromkeys(op for op, _ in keys if (op, device) not in _KNOWN))
    for op, found in zip(new, by_stages([traffic(op) for op in new], device), strict=True):
        found = with_rows(op, with_work(op, found, device), device)
        _KNOWN[op, device] = with_bias(op, with_large_filter(op, found, device), device)
    return [_KNOWN[key] for key in keys]


def by_stages(ops: Sequence[Op], device: PricedGpu, fitted: Constants | None = None) -> list[Estimate]:
    """What is computed of operations, corrected by what was measured of their kinds.

    Args:
        ops: What is executed.
        device: The GPU. A calibration that was made on top of what ships corrects what comes of that.
        fitted: Constants of the first stage, where those of the device are not to be taken.
    """
    before, donor, calibration = device.before, device.donor, device.calibration
    if before is not None:
        estimates = by_stages(ops, before, calibration.constants)
    else:
        estimates = [analytic(op, device, fitted or device.constants) for op in ops]
    covers = calibration.covers if donor is None else device.covers
    covered: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        if covers(op):
            covered.setdefault(op.kind, []).append(index)
    for kind, indices in covered.items():
        together = [ops[index] for index in indices]
        if donor is not None:
            pairs = zip(together, by_stages(together, donor), strict=True)
            corrected = [transferred(op, theirs, donor, device.as_measured) for op, theirs in pairs]
        else:
            own = calibration.kind_constants.get(kind, device.constants)
            first = [estimates[i] for i in indices]
            if before is None:
                first = [analytic(op, device, own) for op in together]
            corrected = calibration.correct(together, device, first)
        for index, better in zip(indices, corrected, strict=True):
            estimates[index] = better
    return estimates
