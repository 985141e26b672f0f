"""What the host spends to launch an operation.

All constants are typical values of CPython with ATen's dispatcher on a server CPU, in seconds; they stand
here until measurements replace them.
"""

from __future__ import annotations

from tilefit.cost.recurrent import STANDARD, cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, OPTIMIZER, Attention, Conv, Gemm, Op, Recurrent, Settings, Streaming

#: One forward operation called from Python: interpreter, dispatcher, autograd, allocation, launch.
FORWARD_S: dict[type[Op], float] = {
    Gemm: 8e-6,
    Conv: 15e-6,
    Attention: 15e-6,
    Recurrent: 40e-6,
    Streaming: 6e-6,
}
#: The backward pass and autograd's engine run in C++.
BACKWARD_SHARE = 0.6
#: One further kernel of the same operation.
KERNEL_S = 2.5e-6
#: One kernel of a compiled graph: no dispatcher, a prepared launch.
COMPILED_S = 4e-6
#: One time step of cuDNN's standard recurrent algorithm, forward and backward, per layer and direction: an
#: eager H200 takes 10 to 14 us a step forward and 23 to 36 us both ways, whatever the size.
RECURRENT_STEP_S = 10e-6
RECURRENT_BACKWARD_STEP_S = 14e-6


def kernels(op: Op, gpu: Gpu) -> int:
    """GPU kernels an operation launches."""
    if isinstance(op, Streaming):
        return op.kernels
    if isinstance(op, Attention):
        return 1 if op.direction == FORWARD else 3
    if isinstance(op, Recurrent) and cudnn_algorithm(op, gpu)[0] == STANDARD:
        return 2 * op.seq_len * op.num_layers * op.directions
    return 1


def launch_s(op: Op, phase: str, gpu: Gpu, settings: Settings) -> float:
    """Host time to launch an operation."""
    if isinstance(op, Recurrent):
        fixed = FORWARD_S[Recurrent]
        steps = op.seq_len * op.num_layers * op.directions
        if op.direction == "backward-weight" or cudnn_algorithm(op, gpu)[0] != STANDARD:
            return fixed
        return fixed + steps * (RECURRENT_STEP_S if op.direction == FORWARD else RECURRENT_BACKWARD_STEP_S)
    count = kernels(op, gpu)
    if settings.compiled and phase != OPTIMIZER:
        return COMPILED_S * count
    share = BACKWARD_SHARE if phase.startswith("backward") else 1.0
    return FORWARD_S[type(op)] * share + KERNEL_S * (count - 1)
