"""What the host spends to launch an operation.

The constants are those of one H200 machine (PyTorch 2.11, 16 virtual cores), in seconds: of an operation as
``benchmarks/collect_h200.py --part launch`` measured it; of what lies between two operations set by hand so
that the host-bound steps of ``benchmarks/results/whole_steps.json`` (Swin, BART, a U-Net) come out. What a
recurrent call costs beside its time steps is a typical value. Another host's processor moves them all; a step
that the GPU bounds does not depend on them.
"""

from __future__ import annotations

from tilefit.cost.recurrent import STANDARD, cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, OPTIMIZER, Attention, Conv, Gemm, Op, Recurrent, Settings, Streaming

#: One forward operation: dispatcher, autograd's bookkeeping, allocation, launch.
FORWARD_S: dict[type[Op], float] = {
    Gemm: 14e-6,
    Conv: 12e-6,
    Attention: 17e-6,
    Recurrent: 40e-6,
    Streaming: 8e-6,
}
#: One operation of the backward pass, with the views and the accumulation that go with it.
BACKWARD_S: dict[type[Op], float] = {
    Gemm: 24e-6,
    Conv: 24e-6,
    Attention: 60e-6,
    Recurrent: 40e-6,
    Streaming: 14e-6,
}
#: Between two operations: the model's own Python, its modules, views; autograd's engine in the backward pass.
BETWEEN_FORWARD_S = 16e-6
BETWEEN_BACKWARD_S = 12e-6
#: One further kernel of the same operation.
KERNEL_S = 3e-6
#: A multi-tensor operation of an optimizer, and each further launch of it: gathering the addresses of the
#: 30 to 110 tensors that one launch holds is what takes the time.
OPTIMIZER_S = 25e-6
OPTIMIZER_KERNEL_S = 60e-6
#: One operation of a compiled graph, launched from the Python that the compiler generates (without CUDA
#: graphs): from the host-bound steps of ``benchmarks/results/whole_steps_compiled.json``.
COMPILED_S = 22e-6
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
    if phase == OPTIMIZER:
        return OPTIMIZER_S + OPTIMIZER_KERNEL_S * (count - 1)
    if settings.compiled:
        return COMPILED_S + KERNEL_S * (count - 1)
    if phase.startswith("backward"):
        return BACKWARD_S[type(op)] + BETWEEN_BACKWARD_S + KERNEL_S * (count - 1)
    return FORWARD_S[type(op)] + BETWEEN_FORWARD_S + KERNEL_S * (count - 1)
