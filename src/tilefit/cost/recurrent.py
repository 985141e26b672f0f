"""Time of recurrent layers: which cuDNN algorithm runs, and what a time step costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp, log

from tilefit.cost.constants import Constants
from tilefit.cost.estimate import Estimate, from_datasheet
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.memory import floor_s
from tilefit.cost.streaming import estimate_streaming
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent, Streaming
from tilefit.ops.dtypes import size_bytes

STANDARD = "STANDARD"
PERSIST_STATIC = "PERSIST_STATIC"
PERSIST_STATIC_SMALL_H = "PERSIST_STATIC_SMALL_H"

_SPREAD = 0.35


def cudnn_algorithm(op: Recurrent, gpu: Gpu) -> tuple[str, str]:
    """The algorithm cuDNN runs a recurrent layer with, and the condition a persistent kernel misses.

    Returns:
        The algorithm's name, and for ``STANDARD`` the first condition of ``PERSIST_STATIC`` that fails
        (empty otherwise). Forward and backward choose separately.

    Source: ``get_algo`` in pytorch/pytorch ``aten/src/ATen/native/cudnn/RNN.cpp``. One deviation: PyTorch
    asks for the small-hidden algorithm in bf16 too, but on an H200 (cuDNN 9.19) bf16 layers ran one product
    and one pointwise kernel per time step at every size, so bf16 counts as standard here.
    """
    if op.proj_size:
        return STANDARD, "a projection (proj_size) is only in the standard algorithm"
    if op.packed:
        return STANDARD, "a PackedSequence has varying lengths"
    if op.dtype == "bf16":
        return STANDARD, "bf16: the persistent kernels are fp16 only"
    if op.dtype != "fp64" and gpu.compute_capability >= (6, 0) and op.hidden_size <= _small_hidden(op):
        return PERSIST_STATIC_SMALL_H, ""
    failed = _failed_condition(op, gpu)
    return (STANDARD, failed) if failed else (PERSIST_STATIC, "")


def _small_hidden(op: Recurrent) -> int:
    """The largest hidden size of the small-hidden algorithm."""
    if op.gates == 1:
        return 384 if op.direction == FORWARD else 256
    return 192 if op.direction == FORWARD else 128


def _failed_condition(op: Recurrent, gpu: Gpu) -> str:
    """The first condition of the persistent algorithm that a layer misses; empty if none."""
    if op.dtype != "fp16":
        return f"{op.dtype}: the persistent kernels are fp16 only"
    if op.num_layers > 1:
        return f"{op.num_layers} layers in one module: only a single layer can persist"
    if op.bidirectional:
        return "two directions in one module: only a single direction can persist"
    if op.hidden_size > 1024:
        return f"hidden size {op.hidden_size} exceeds 1024"
    if op.hidden_size % 128:
        return f"hidden size {op.hidden_size} is not a multiple of 128"
    if op.input_size % 128:
        return f"input size {op.input_size} is not a multiple of 128"
    return _failed_device_condition(op, gpu)


def _failed_device_condition(op: Recurrent, gpu: Gpu) -> str:
    batch, steps = op.batch, op.seq_len
    major, minor = gpu.compute_capability
    if major == 7:
        if minor != 0:
            return "Turing never runs the persistent kernels"
        if not ((batch % 16 == 0 and batch not in (80, 112)) or batch == 8):
            return f"batch {batch} is neither 8 nor a multiple of 16 other than 80 and 112"
        if (steps >= 40 and batch <= 128) or (steps >= 20 and batch <= 96) or (steps >= 10 and batch <= 32):
            return ""
        return f"{steps} steps at batch {batch}: needs 40 steps up to 128, 20 up to 96, 10 up to 32"
    if major < 8:
        return f"compute capability {major}.{minor} is below 7.0"
    if gpu.sms < 98:
        return f"{gpu.sms} SMs: the persistent kernels need 98"
    if minor == 6:
        return "compute capability 8.6 never runs the persistent kernels"
    if op.mode == "GRU":
        return "a GRU never persists on compute capability 8.0 and later"
    if batch % 8:
        return f"batch {batch} is not a multiple of 8"
    if batch > 128:
        return f"batch {batch} exceeds 128"
    if op.gates == 1 and batch >= 96 and op.hidden_size >= 896:
        return f"batch {batch} with hidden size {op.hidden_size}: needs a batch below 96 or hidden below 896"
    return ""


#: Microseconds per time step of the persistent algorithm, forward and forward plus backward, by hidden size
#: and batch: H200, fp16, 256 steps, input size = hidden size, input product and weight gradients included
#: (PyTorch 2.11, cuDNN 9.19).
_PERSISTENT_US: dict[bool, dict[tuple[int, int], tuple[float, float]]] = {
    # LSTM
    True: {
        (256, 16): (1.46, 5.26), (256, 32): (2.97, 8.41), (256, 64): (6.89, 17.99), (256, 128): (4.53, 12.74),
        (512, 16): (1.64, 5.79), (512, 32): (3.64, 9.67), (512, 64): (6.79, 18.70), (512, 128): (8.37, 30.93),
        (1024, 16): (2.29, 8.07), (1024, 32): (4.28, 11.62), (1024, 64): (8.30, 22.37),
        (1024, 128): (16.35, 43.03),
    },
    # vanilla; 256 is the small-hidden algorithm
    False: {
        (256, 16): (1.38, 3.89), (256, 32): (1.32, 2.82), (256, 64): (1.28, 2.94), (256, 128): (1.43, 4.07),
        (512, 16): (3.25, 7.11), (512, 32): (4.85, 10.49), (512, 64): (4.97, 10.99),
        (512, 128): (5.04, 11.44),
        (1024, 16): (3.79, 8.96), (1024, 32): (4.95, 10.44), (1024, 64): (4.96, 10.73),
        (1024, 128): (10.07, 24.31),
    },
}  # fmt: skip
_HIDDEN = (256, 512, 1024)
_BATCHES = (16, 32, 64, 128)
#: Datasheet clock and SMs of the GPU of the table: a persistent step is a chain of latencies.
_TABLE_CLOCK_HZ = 1.83e9
_TABLE_SMS = 132


def _weight(grid: tuple[int, ...], value: int) -> tuple[int, int, float]:
    """The neighbours of a value in a grid of powers of two, and the upper one's weight; clamped."""
    value = min(max(value, grid[0]), grid[-1])
    for low, high in pairwise(grid):
        if value <= high:
            return low, high, log(value / low) / log(high / low)
    raise AssertionError("unreachable: the value is clamped to the grid")


def _persistent_step_s(op: Recurrent, gpu: Gpu) -> float:
    """One time step of a persistent kernel: the H200's table, scaled to the GPU's SMs and clock."""
    table = _PERSISTENT_US[op.gates > 1]
    h0, h1, wh = _weight(_HIDDEN, op.hidden_size)
    b0, b1, wb = _weight(_BATCHES, op.batch)

    def at(column: int) -> float:
        rows = [(1 - wb) * log(table[h, b0][column]) + wb * log(table[h, b1][column]) for h in (h0, h1)]
        return exp((1 - wh) * rows[0] + wh * rows[1])

    forward = at(0)
    us = forward if op.direction == FORWARD else at(1) - forward
    return us * 1e-6 * max(1.0, _TABLE_SMS / gpu.sms) * _TABLE_CLOCK_HZ / gpu.boost_clock_hz


def estimate_recurrent(op: Recurrent, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted GPU time of a recurrent layer's pass.

    The standard algorithm runs a product and a pointwise kernel per time step, layer and direction; on an
    H200 these take 4 to 15 us, but an eager call waits 10 us a step for the host to launch them (see
    :mod:`tilefit.cost.launch`). The weight gradient is one product over all time steps in either algorithm.
    """
    algorithm, failed = cudnn_algorithm(op, gpu)
    products = [(estimate_gemm(gemm, gpu, constants), count) for gemm, count in op.gemms()]
    weight_gradient = op.direction == BACKWARD_WEIGHT
    if algorithm == STANDARD or weight_gradient:
        steps = op.seq_len * op.num_layers * op.directions
        math_s = sum(e.math_s * count for e, count in products)
        memory_s = sum(e.memory_s * count for e, count in products)
        time_s = sum(e.time_s * count for e, count in products)
        if not weight_gradient:
            # The gates and the cell state in, the hidden and the cell state out.
            cells = op.batch * op.hidden_size
            read = cells * (op.gates + 1) * size_bytes(op.dtype)
            written = 2 * cells * size_bytes(op.dtype) * (1 if op.direction == FORWARD else op.gates)
            gates = Streaming("pointwise", cells * op.gates, read, written, op.dtype, 10.0)
            time_s += steps * estimate_streaming(gates, gpu, constants).time_s
    else:
        # The table includes the input product, and in backward the weight gradient, which is priced apart.
        time_s = op.seq_len * _persistent_step_s(op, gpu)
        if op.direction == BACKWARD_DATA:
            gradient = replace(op, direction=BACKWARD_WEIGHT)
            time_s = max(
                time_s / 2,
                time_s - sum(estimate_gemm(g, gpu, constants).time_s * c for g, c in gradient.gemms()),
            )
        math_s = sum(e.math_s * count for e, count in products)
        memory_s = 0.0
    floor = floor_s(op, gpu)
    time_s = max(time_s, floor)
    busy = max(math_s, memory_s)
    return from_datasheet(
        time_s,
        floor,
        _SPREAD,
        busy_s=busy,
        math_s=math_s,
        memory_s=memory_s,
        kernel_family=f"cudnn {algorithm}",
        reason=f"cuDNN runs {algorithm}" + (f": {failed}" if failed else ""),
    )
