"""The first stage of the model: what is computed from an operation, a GPU's facts and a few constants."""

from __future__ import annotations

from tilefit.cost.constants import Constants, constants
from tilefit.cost.estimate import Estimate
from tilefit.cost.kinds import ByKind
from tilefit.errors import UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Op

#: Element types whose products run on units of their own or not at all; others fall to the fp32 pipelines.
_WITHOUT_FALLBACK = ("fp8", "int8")

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
        UsageError: the GPU has no units for its element type, and nothing else runs it.
    """
    if op.multiplies and op.dtype in _WITHOUT_FALLBACK and not gpu.supports(op.dtype):
        raise UsageError(
            f"{gpu.title} has no units for {op.dtype} products, or their rate is not known",
            hint=f"It multiplies {', '.join(gpu.flop_per_clock_per_sm)}.",
        )
    estimate: Estimate = estimates[type(op)](op, gpu, fitted or constants(gpu))
    return estimate
