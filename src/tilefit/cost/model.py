"""The one entry: an operation and a GPU in, a predicted time out."""

from __future__ import annotations

from collections.abc import Iterable

from tilefit import gpus
from tilefit.cost.attention import estimate_attention
from tilefit.cost.calibrated import profile
from tilefit.cost.conv import estimate_conv
from tilefit.cost.estimate import Estimate
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.profiles import constants
from tilefit.cost.recurrent import estimate_recurrent
from tilefit.cost.streaming import estimate_streaming
from tilefit.gpus import Gpu
from tilefit.ops import Attention, Conv, Gemm, Op, Recurrent, Streaming

#: Estimates made so far; forgotten all at once when there are too many.
_KNOWN: dict[tuple[Op, Gpu], Estimate] = {}
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
    known = _KNOWN.get((op, device))
    return known if known is not None else estimate_all((op,), device)[0]


def estimate_all(ops: Iterable[Op], gpu: Gpu) -> list[Estimate]:
    """Predicted times of many operations; equal ones are priced once, and those of a kind together."""
    keys = [(op, gpu) for op in ops]
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    new = {key[0]: None for key in keys if key not in _KNOWN}
    fitted = profile(gpu) if new else None
    covered: dict[str, list[Op]] = {}
    for op in new:
        _KNOWN[op, gpu] = analytic(op, gpu)
        if fitted is not None and fitted.covers(op):
            covered.setdefault(op.kind, []).append(op)
    for together in covered.values():
        assert fitted is not None
        first = [_KNOWN[op, gpu] for op in together]
        for op, corrected in zip(together, fitted.correct(together, gpu, first), strict=True):
            _KNOWN[op, gpu] = corrected
    return [_KNOWN[key] for key in keys]


def analytic(op: Op, gpu: Gpu) -> Estimate:
    """The first stage alone: what the model says of a GPU that nobody has measured."""
    fitted = constants(gpu)
    match op:
        case Gemm():
            return estimate_gemm(op, gpu, fitted)
        case Streaming():
            return estimate_streaming(op, gpu, fitted)
        case Conv():
            return estimate_conv(op, gpu, fitted)
        case Attention():
            return estimate_attention(op, gpu, fitted)
        case Recurrent():
            return estimate_recurrent(op, gpu, fitted)
        case _:
            raise TypeError(f"no cost model for {type(op).__name__}")
