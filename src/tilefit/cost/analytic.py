"""The first stage of the model: what is computed from an operation, a GPU's facts and a few constants."""

from __future__ import annotations

from typing import Any

from tilefit.cost.constants import Constants, constants
from tilefit.cost.estimate import Estimate, bound
from tilefit.cost.kinds import ByKind
from tilefit.cost.memory import floor_s
from tilefit.errors import UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Op

#: Element types whose products run on units of their own or not at all; others fall to the fp32 pipelines.
_WITHOUT_FALLBACK = ("fp8", "int8")

#: ``(op, gpu, constants) -> Estimate`` of each kind.
estimates = ByKind()


def from_datasheet(
    op: Op,
    gpu: Gpu,
    time_s: float,
    spread: float,
    *,
    math_s: float,
    memory_s: float,
    busy_s: float | None = None,
    floor: float | None = None,
    **facts: Any,
) -> Estimate:
    """An estimate that rests on no measurement of the operation.

    Args:
        op: What is executed.
        gpu: The GPU.
        time_s: The prediction, where physics allows it.
        spread: The interval reaches from ``time_s / (1 + spread)`` to ``time_s * (1 + spread)``.
        math_s, memory_s: Time that the arithmetic and the traffic alone would take.
        busy_s: The part of the time that is not a fixed cost; below half of it latency is the bound. By
            default the larger of ``math_s`` and ``memory_s``.
        floor: The least time that physics allows, where an algorithm needs less arithmetic than that.
        facts: Further fields of the estimate.
    """
    floor = floor_s(op, gpu) if floor is None else floor
    time_s = max(time_s, floor)
    low_s, limit = max(time_s / (1 + spread), floor), bound(math_s, memory_s, time_s, busy_s)
    return Estimate(time_s, low_s, time_s * (1 + spread), limit, math_s, memory_s, **facts)


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
        what = f"{gpu.title} has no units for {op.dtype} products, or their rate is not known"
        raise UsageError(what, hint=f"It multiplies {', '.join(gpu.flop_per_clock_per_sm)}.")
    estimate: Estimate = estimates[type(op)](op, gpu, fitted or constants(gpu))
    return estimate
