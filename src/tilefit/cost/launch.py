"""What the host spends to launch an operation.

Medians of eager calls on tiny tensors, on the host of an H200 (PyTorch 2.11, Python 3.12), by
``benchmarks/collect_h200.py --part launch``. A backward operation is what a call with its backward pass takes
beyond the forward call, the gradient's fill and the 45 us that starting autograd takes. Other hosts differ.
"""

from __future__ import annotations

from tilefit.cost.recurrent import STANDARD, cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, OPTIMIZER, Attention, Conv, Gemm, Op, Recurrent, Settings, Streaming

#: One forward operation called from Python: interpreter, dispatcher, autograd, allocation, launch.
FORWARD_S: dict[type[Op], float] = {
    Gemm: 15e-6,
    Conv: 16e-6,
    Attention: 17e-6,
    Recurrent: 40e-6,
    Streaming: 8.5e-6,
}
#: One operation of the backward pass, which autograd's engine calls from its own thread: the two gradients
#: of a product or a convolution count apart.
BACKWARD_S: dict[type[Op], float] = {
    Gemm: 25e-6,
    Conv: 25e-6,
    Attention: 63e-6,
    Recurrent: 40e-6,
    Streaming: 14e-6,
}
#: One further kernel of the same operation.
KERNEL_S = 2.5e-6
#: One kernel of a multi-tensor operation, for which the host lists up to 110 tensors (AdamW and SGD over 100
#: and 300 tensors: 40 to 54 us a kernel).
MULTI_TENSOR_KERNEL_S = 48e-6
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
    table = BACKWARD_S if phase.startswith("backward") else FORWARD_S
    further_s = MULTI_TENSOR_KERNEL_S if phase == OPTIMIZER else KERNEL_S
    return table[type(op)] + further_s * (count - 1)
