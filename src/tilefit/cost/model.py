"""The one entry: an operation and a GPU in, a predicted time out."""

from __future__ import annotations

from functools import lru_cache

from tilefit import gpus
from tilefit.cost.attention import estimate_attention
from tilefit.cost.conv import estimate_conv
from tilefit.cost.estimate import Estimate
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.profiles import constants
from tilefit.cost.recurrent import estimate_recurrent
from tilefit.cost.streaming import estimate_streaming
from tilefit.gpus import Gpu
from tilefit.ops import Attention, Conv, Gemm, Op, Recurrent, Streaming


def estimate(op: Op, gpu: Gpu | str) -> Estimate:
    """Predicted time of an operation on a GPU, with an interval and the reason.

    Args:
        op: What is executed.
        gpu: A GPU, or its name.

    Raises:
        UsageError: no GPU has this name.
        TypeError: the operation is of a kind the model does not know.
    """
    return _estimate(op, gpus.get(gpu) if isinstance(gpu, str) else gpu)


@lru_cache(maxsize=65536)
def _estimate(op: Op, gpu: Gpu) -> Estimate:
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
