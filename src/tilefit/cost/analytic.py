"""The first stage of the model: what is computed from an operation, a GPU's facts and a few constants."""

from __future__ import annotations

from tilefit.cost.attention import estimate_attention
from tilefit.cost.collective import estimate_collective
from tilefit.cost.constants import Constants, constants
from tilefit.cost.conv import estimate_conv
from tilefit.cost.estimate import Estimate
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.persistent import estimate_layers
from tilefit.cost.streaming import estimate_streaming
from tilefit.gpus import Gpu
from tilefit.ops import Attention, Collective, Conv, Gemm, Op, Recurrent, Streaming


def analytic(op: Op, gpu: Gpu, fitted: Constants | None = None) -> Estimate:
    """The first stage alone.

    Args:
        op: What is executed.
        gpu: The GPU.
        fitted: Constants fitted to this GPU; without them those of its kind.

    Raises:
        TypeError: the operation is of a kind the model does not know.
    """
    fitted = fitted or constants(gpu)
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
            return estimate_layers(op, gpu, fitted)
        case Collective():
            return estimate_collective(op, gpu)
        case _:
            raise TypeError(f"no cost model for {type(op).__name__}")
