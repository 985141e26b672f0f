"""How many kernels cuDNN launches for a recurrent layer.

Read off the kernels of 640 calls on an H200 (torch 2.11, cuDNN 9.19; ``benchmarks/launch_counts.py``). The
standard algorithm runs a product and the gates in each step of each layer and direction. All else is a few
products over many steps: where layers lie upon each other, so that they overlap, over some steps at once; the
weights' gradients of packed sequences over steps that have as many samples.
"""

from __future__ import annotations

from tilefit.cost.cudnn import PERSIST_STATIC, STANDARD, cudnn_algorithm
from tilefit.cost.gemm import kernels as product_kernels
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent
from tilefit.ops.dtypes import HALVES

#: ``(largest mini-batch, steps)`` that layers upon each other do at once, in each pass; larger ones the last.
_AT_ONCE = {
    FORWARD: ((2, 32), (64, 8), (1 << 62, 4)),
    BACKWARD_DATA: ((2, 32), (8, 16), (64, 4), (1 << 62, 2)),
}
#: What the algorithm for fp16 alone runs in each pass; the weights' gradients are as of the others.
_PERSIST_STATIC = {FORWARD: 3, BACKWARD_DATA: 5}


def kernels(op: Recurrent, gpu: Gpu) -> int:
    """Kernels of one pass of a layer that cuDNN runs, the zeros that PyTorch puts into the gradients that
    nobody gave and into the weights' included."""
    cells = op.num_layers * op.directions
    algorithm = cudnn_algorithm(op, gpu)[0]
    stepwise = algorithm == STANDARD and op.dtype in HALVES  # the contractions of others are seldom split
    split = sum(
        count * (product_kernels(gemm, gpu) - 1)
        for gemm, count in op.gemms()
        if stepwise or count <= op.directions
    )
    if op.direction == BACKWARD_WEIGHT:
        # The bias; the input's matrix; the state's, and that of the state before the first step.
        products = 2 + min(op.seq_len, 2) + _shrinking(op) * (1 + op.directions) // 2
        return 1 + cells * products + split
    chunks = _chunks(op) if algorithm == STANDARD else 1
    # Masks are made forward, and the gradient of the last layer's input is masked once more backward.
    dropout = op.dropout * (op.num_layers - 1) * op.directions * (1 + chunks)
    # Forward bf16 fills once more than others. Backward the gradients of the states after the last step are
    # zeros, and those of both directions are added.
    states = int(op.dtype == "bf16")
    if op.direction == BACKWARD_DATA:
        states = 1 + (op.mode == "LSTM") + op.num_layers * (op.directions - 1)
    if algorithm == STANDARD:
        return cells * (2 * op.seq_len + chunks) + split + dropout + states
    if algorithm == PERSIST_STATIC:
        return cells * _PERSIST_STATIC[op.direction] + split + states
    # The input's product, all steps in one, and forward a GRU's bias or backward what is left of the gates.
    return cells * (2 + (op.direction == BACKWARD_DATA or op.mode == "GRU")) + split + dropout + states


def _chunks(op: Recurrent) -> int:
    """How many products over several steps each layer's input takes."""
    if op.num_layers == 1 or op.bidirectional:
        return 1
    steps = next(steps for batch, steps in _AT_ONCE[op.direction] if op.batch <= batch)
    if op.direction == FORWARD:
        steps = max(1, min(steps, op.seq_len // op.num_layers))
    return -(-op.seq_len // steps)


def _shrinking(op: Recurrent) -> int:
    """At how many steps a packed mini-batch becomes smaller: lengths spread evenly about their mean, of which
    some coincide."""
    missing = 2 * (op.seq_len - op.all_rows / op.batch)
    steps = min(op.seq_len - 1, missing)
    if not op.packed or steps < 1:
        return 0
    return round(steps * (1 - (1 - 1 / steps) ** (op.batch - 1)))
