"""The one entry: an operation and a GPU in, a predicted time out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

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

_MOST_KNOWN = 100_000


@lru_cache(maxsize=64)
def _known(device: PricedGpu) -> dict[Op, Estimate]:
    """Estimates made so far; forgotten all at once when there are too many."""
    return {}


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
    device, ops = priced(gpu), [*ops]
    known = _known(device)
    if len(known) > _MOST_KNOWN:
        known.clear()
    new = [op for op in dict.fromkeys(ops) if op not in known]
    for op, found in zip(new, by_stages([traffic(op) for op in new], device), strict=True):
        found = with_rows(op, with_work(op, found, device), device)
        known[op] = with_bias(op, with_large_filter(op, found, device), device)
    return [known[op] for op in ops]


def by_stages(ops: Sequence[Op], device: PricedGpu, fitted: Constants | None = None) -> list[Estimate]:
    """What is computed of operations, corrected by what was measured of their kinds.

    Args:
        ops: What is executed.
        device: The GPU. A calibration that was made on top of what ships corrects what comes of that.
        fitted: Constants of the first stage, where those of the device are not to be taken.
    """
    before, donor, calibration = device.before, device.donor, device.calibration
    covers = calibration.covers if donor is None else device.covers
    of_kinds: dict[str, list[int]] = {}  # what nobody measured together, too
    for index, op in enumerate(ops):
        of_kinds.setdefault(op.kind if covers(op) else "", []).append(index)
    shipped = before and by_stages(ops, before, calibration.constants)
    estimates: dict[int, Estimate] = {}
    for kind, indices in of_kinds.items():
        together = [ops[index] for index in indices]
        if shipped:
            found = [shipped[index] for index in indices]
        elif kind and donor is not None:
            measured, pairs = device.as_measured, zip(together, by_stages(together, donor), strict=True)
            found = [transferred(op, theirs, donor, measured) for op, theirs in pairs]
        else:
            own = calibration.kind_constants.get(kind) if kind else fitted
            found = [analytic(op, device, own or device.constants) for op in together]
        if kind and donor is None:
            found = calibration.correct(together, device, found)
        estimates.update(zip(indices, found, strict=True))
    return [estimates[index] for index in range(len(ops))]
