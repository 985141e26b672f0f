"""What an operation is: shapes, floating-point operations, bytes."""

from tilefit.ops.attention import Attention
from tilefit.ops.base import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, OPTIMIZER, PHASES, Op
from tilefit.ops.collective import Collective
from tilefit.ops.conv import Conv, Conv2d
from tilefit.ops.gemm import Gemm
from tilefit.ops.recurrent import Recurrent
from tilefit.ops.step import Fallback, Memory, Parameter, Settings, Shard, Site, Step, StepOp, TensorRef
from tilefit.ops.streaming import Streaming

__all__ = [
    "BACKWARD_DATA",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "OPTIMIZER",
    "PHASES",
    "Attention",
    "Collective",
    "Conv",
    "Conv2d",
    "Fallback",
    "Gemm",
    "Memory",
    "Op",
    "Parameter",
    "Recurrent",
    "Settings",
    "Shard",
    "Site",
    "Step",
    "StepOp",
    "Streaming",
    "TensorRef",
]
