"""What an operation is: shapes, floating-point operations, bytes."""

from tilefit.ops.attention import Attention
from tilefit.ops.base import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, OPTIMIZER, PHASES, Growth, Op
from tilefit.ops.collective import Collective
from tilefit.ops.conv import Conv, Conv2d
from tilefit.ops.entries import Fallback, Parameter, Settings, Shard, Site, StepOp, TensorRef
from tilefit.ops.gemm import Gemm
from tilefit.ops.memory import Memory
from tilefit.ops.program import Assumption, Called, Exchange, Habit, HostEvent, Loader, Program
from tilefit.ops.recurrent import Recurrent
from tilefit.ops.step import Step
from tilefit.ops.streaming import Streaming

#: Kinds that multiply matrices.
PRODUCTS = tuple(name for name, kind in Op.KINDS.items() if kind.multiplies)

__all__ = [
    "BACKWARD_DATA",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "OPTIMIZER",
    "PHASES",
    "PRODUCTS",
    "Assumption",
    "Attention",
    "Called",
    "Collective",
    "Conv",
    "Conv2d",
    "Exchange",
    "Fallback",
    "Gemm",
    "Growth",
    "Habit",
    "HostEvent",
    "Loader",
    "Memory",
    "Op",
    "Parameter",
    "Program",
    "Recurrent",
    "Settings",
    "Shard",
    "Site",
    "Step",
    "StepOp",
    "Streaming",
    "TensorRef",
]
