"""The first stage of the model: what is computed from an operation, a GPU's facts and a few constants."""

from __future__ import annotations

from tilefit.cost.constants import Constants, constants
from tilefit.cost.estimate import Estimate
from tilefit.cost.kinds import ByKind
from tilefit.gpus import Gpu
from tilefit.ops import Op

#: ``(op, gpu, constants) -> Estimate`` of each kind.
estimates = ByKind()


def analytic(op: Op, gpu: Gpu, fitted: Constants | None = None) -> Estimate:
    """The first stage alone.

    Args:
        op: What is executed.
        gpu: The GPU.
        fitted: Constants fitted to this GPU; without them those of its kind.

    Raises:
        TypeError: the operation is of a kind the model does not know.
    """
    estimate: Estimate = estimates[type(op)](op, gpu, fitted or constants(gpu))
    return estimate
