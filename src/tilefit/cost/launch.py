"""What the host spends to launch an operation.

The constants are seconds on one H200's host (PyTorch 2.11, 16 virtual cores). ``benchmarks/fit_launch.py``
fits them to what 19 eager training steps spent in their forward pass, backward pass and optimizer
(``benchmarks/results/whole_steps.json``), from which they differ by 9, 9 and 25 % in the median. Another
host moves them all together: two of the same kind differed by up to a factor of two. ``tilefit calibrate``
measures that factor. A step that the GPU bounds does not depend on them.
"""

from __future__ import annotations

from tilefit.cost.recurrent import STANDARD, cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.ops import (
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Attention,
    Conv,
    Gemm,
    Op,
    Recurrent,
    Settings,
    Step,
    Streaming,
)

#: A call alone, in a loop that does nothing else: 14, 12 and 17 us (``benchmarks/collect_h200.py --part
#: launch``), on a host about 1.7 times as fast as that of the steps, for which all constants here are.
CALL_S: dict[type[Op], float] = {Gemm: 24e-6, Conv: 20e-6, Attention: 29e-6}
#: One forward operation of a model: the call, with the modules, the views and the Python around it.
FORWARD_S: dict[type[Op], float] = {
    Gemm: 31e-6,
    Conv: 53e-6,
    Attention: 60e-6,
    Recurrent: 300e-6,
    Streaming: 24e-6,
}
#: One operation of the backward pass, with the views and the accumulation of gradients that go with it.
BACKWARD_S: dict[type[Op], float] = {
    Gemm: 78e-6,
    Conv: 83e-6,
    Attention: 100e-6,
    Recurrent: 300e-6,
    Streaming: 6.5e-6,
}
#: One further kernel of the same operation.
KERNEL_S = 6.8e-6
#: Before the first operation of the forward pass, of the backward pass, and of the optimizer. All the steps
#: that the last is fitted to have AdamW's eight operations; what one of them takes is that of a call alone:
#: the multi-tensor AdamW over 10 tensors took 99 us more than the fused one, which is one operation
#: (``benchmarks/collect_h200.py --part launch``), on the faster host.
FIXED_S = {"forward": 0.4e-3, "backward": 1.1e-3, "optimizer": 0.71e-3}
#: A multi-tensor operation of an optimizer, and each further launch of it: gathering the addresses of the
#: 30 to 110 tensors that one launch holds is what takes the time.
OPTIMIZER_S = 24e-6
OPTIMIZER_KERNEL_S = 66e-6
#: One kernel that the compiler wrote, one call of a library, launched from the Python that the compiler
#: generates (without CUDA graphs), and one parameter: the check that it is the same, and its gradient's way
#: back to it. Set by hand to the host-bound steps of
#: ``benchmarks/results/whole_steps_compiled.json`` whose model is one graph (MobileNet, EfficientNet, U-Net,
#: Swin) and to BART's, which has the most launches; they differ by -9 to +10 %.
COMPILED_KERNEL_S = 15e-6
COMPILED_CALL_S = 22e-6
COMPILED_PARAMETER_S = 15e-6
#: One operation that is replayed from a CUDA graph: how much longer a replay takes than its kernels, in the
#: median over 238 operations of one kernel (``benchmarks/collect_h200.py --part method``).
GRAPHED_S = 0.35e-6
#: One time step of cuDNN's standard recurrent algorithm, forward and backward, per layer and direction: the
#: medians of the LSTMs in bf16 that ``benchmarks/collect_h200.py --part recurrent`` timed from outside.
RECURRENT_STEP_S = 22e-6
RECURRENT_BACKWARD_STEP_S = 34e-6


def kernels(op: Op, gpu: Gpu) -> int:
    """GPU kernels an operation launches."""
    if isinstance(op, Streaming):
        return op.kernels
    if isinstance(op, Attention):
        return 1 if op.direction == FORWARD else 3
    if isinstance(op, Recurrent) and cudnn_algorithm(op, gpu)[0] == STANDARD:
        return 2 * op.seq_len * op.num_layers * op.directions
    return 1


def begin_s(part: str, step: Step) -> float:
    """Host time before the first operation of the forward pass, the backward pass or the optimizer."""
    # A compiled backward pass hands over all gradients when it is done.
    handed_over = len(step.parameters) if step.settings.compiled and part == OPTIMIZER else 0
    return FIXED_S.get(part, 0.0) + COMPILED_PARAMETER_S * handed_over


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
        if isinstance(op, Streaming):
            return COMPILED_KERNEL_S * count
        # One call makes both gradients of a convolution.
        return KERNEL_S if isinstance(op, Conv) and op.direction == BACKWARD_WEIGHT else COMPILED_CALL_S
    each = BACKWARD_S if phase.startswith("backward") else FORWARD_S
    # A collective is one call of its library: nothing is known that sets it apart from a streaming kernel.
    return each.get(type(op), each[Streaming]) + KERNEL_S * (count - 1)
