"""Time of recurrent layers: by cuDNN's algorithms, and by the persistent kernels of ``tilefit.nn``."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import exp, log

from tilefit.cost.analytic import estimates, from_datasheet
from tilefit.cost.constants import Constants
from tilefit.cost.cudnn import PERSIST_STATIC, PERSIST_STATIC_SMALL_H, STANDARD, cudnn_algorithm
from tilefit.cost.estimate import Estimate
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.launch import counts, launches
from tilefit.cost.persistent import persistent_steps
from tilefit.cost.recurrent_kernels import kernels
from tilefit.cost.recurrent_times import table
from tilefit.cost.streaming import estimate_streaming
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent, Settings, StepOp, Streaming
from tilefit.ops.dtypes import size_bytes

#: Half-widths of the 80 % interval: of cuDNN's algorithms as computed; as corrected by the sizes measured,
#: each left out; and of the persistent kernels, as sizes between those measured take what the nearest took.
_SPREAD = 0.35
_SPREAD_MEASURED = {STANDARD: 0.15, PERSIST_STATIC: 0.2, PERSIST_STATIC_SMALL_H: 0.7}
_PERSISTENT_SPREAD = 0.3

#: A recurrent layer: the median of the LSTMs in bf16 that ``benchmarks/collect_h200.py --part recurrent``
#: timed from outside. And one time step of cuDNN's standard recurrent algorithm, forward and backward, per
#: layer and direction: the lower quartiles over the host-bound cells of
#: ``benchmarks/results/recurrent_grid_h200.json``, of which other processes disturbed some.
RECURRENT_S = 300e-6
RECURRENT_STEP_S = 14e-6
RECURRENT_BACKWARD_STEP_S = 20e-6


#: What the persistent kernels of ``tilefit.nn`` launch in each pass of a layer: two products or a product and
#: a sum, the filling of the exchange buffer and the recurrence.
PERSISTENT_KERNELS = 4


@launches(Recurrent)
def launch_recurrent(op: Recurrent, phase: str, gpu: Gpu, settings: Settings) -> tuple[int, float]:
    """One call, in which the standard algorithm takes the host's time for each step."""
    if persistent_steps(op, gpu) is not None:
        return PERSISTENT_KERNELS * op.num_layers, RECURRENT_S * op.num_layers
    stepwise = cudnn_algorithm(op, gpu)[0] == STANDARD and op.direction != BACKWARD_WEIGHT
    each_s = RECURRENT_STEP_S if op.direction == FORWARD else RECURRENT_BACKWARD_STEP_S
    steps = op.seq_len * op.num_layers * op.directions * stepwise
    return kernels(op, gpu), RECURRENT_S + steps * each_s


@counts(Recurrent)
def count_recurrent(op: Recurrent, entry: StepOp, gpu: Gpu) -> int:
    """Those that are launched, whatever the host's time."""
    return launch_recurrent(op, entry.phase, gpu, Settings())[0]


@estimates(Recurrent)
def estimate_recurrent(op: Recurrent, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted GPU time of a recurrent layer's pass, by whatever runs it.

    Layers, and the two directions of one, count one after another. Of the backward pass the weights'
    gradients are priced as products, the rest is what is left of the time measured.
    """
    steps = persistent_steps(op, gpu)
    if steps is None:
        return _by_cudnn(op, gpu, constants, _measured_over_computed(op, gpu, constants))
    if op.direction == BACKWARD_WEIGHT:
        return _by_cudnn(op, gpu, constants, 1.0)

    recurrences = op.seq_len * op.num_layers * op.directions
    if op.direction == BACKWARD_DATA:
        time_s = recurrences * steps.backward_us * 1e-6
        time_s = max(time_s / 2, time_s - _products_s(replace(op, direction=BACKWARD_WEIGHT), gpu, constants))
    else:
        time_s = recurrences * steps.forward_us * 1e-6
    # Measured with as many input features as hidden units.
    square = replace(op, input_size=op.hidden_size)
    time_s += _products_s(op, gpu, constants) - _products_s(square, gpu, constants)
    math_s = sum(estimate_gemm(gemm, gpu, constants).math_s * count for gemm, count in op.gemms())
    row = steps.row
    return from_datasheet(
        op,
        gpu,
        time_s,
        _PERSISTENT_SPREAD,
        math_s=math_s,
        memory_s=0.0,
        busy_s=min(math_s, time_s),
        kernel_family="tilefit persistent",
        reason=f"measured with {row.hidden} units, mini-batch {row.batch}, {row.steps} steps",
    )


def _products_s(op: Recurrent, gpu: Gpu, constants: Constants) -> float:
    return sum(estimate_gemm(gemm, gpu, constants).time_s * count for gemm, count in op.gemms())


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
    # vanilla
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


def _persistent_step_s(op: Recurrent, gpu: Gpu) -> float:
    """One time step of a persistent kernel: the H200's table, interpolated in the logarithms of its sizes,
    scaled to the GPU's SMs and clock."""
    import numpy as np

    table = _PERSISTENT_US[op.gates > 1]

    def at(column: int) -> float:
        rows = [[log(table[hidden, batch][column]) for batch in _BATCHES] for hidden in _HIDDEN]
        of_batch = [np.interp(log(op.batch), np.log(_BATCHES), row) for row in rows]
        return exp(float(np.interp(log(op.hidden_size), np.log(_HIDDEN), of_batch)))

    forward = at(0)
    us = forward if op.direction == FORWARD else at(1) - forward
    return us * 1e-6 * max(1.0, _TABLE_SMS / gpu.sms) * _TABLE_CLOCK_HZ / gpu.boost_clock_hz


#: cuDNN's algorithm for few hidden units runs the whole recurrence of a layer in one kernel, which reads the
#: weights (in fp32) once and holds them in a multiprocessor's registers; as many as do not fit it reads again
#: from L2 in each step. Mini-batches in fp16 go through the Tensor Cores, whose weights fit. Seconds and
#: seconds per byte before the first step; seconds of a step, and of it the bytes of weights that a clock
#: takes, from registers, from L2, and in Tensor Cores (H200, 16 to 256 steps).
_SMALL_BEGIN_S, _SMALL_LOAD_S_PER_BYTE = 8.5e-6, 0.135e-9
_REGISTERS_BYTES, _SMALL_TENSOR_BATCH = 1 << 18, 8
_SMALL_STEP = {"registers": (0.3e-6, 228.0), "L2": (0.3e-6, 64.0), "Tensor Cores": (0.7e-6, 180.0)}


def _small_hidden_s(op: Recurrent, gpu: Gpu) -> float:
    """A pass of the small-hidden algorithm, one layer and direction after another."""
    weights = 4 * op.gates * op.hidden_size**2
    if op.dtype == "fp16" and op.batch >= _SMALL_TENSOR_BATCH:
        least_s, per_clock = _SMALL_STEP["Tensor Cores"]
    else:
        least_s, per_clock = _SMALL_STEP["registers" if weights < _REGISTERS_BYTES else "L2"]
    step_s = least_s + weights / (per_clock * gpu.boost_clock_hz)
    began_s = _SMALL_BEGIN_S + weights * _SMALL_LOAD_S_PER_BYTE
    return op.num_layers * op.directions * (began_s + op.seq_len * step_s)


def _by_cudnn(op: Recurrent, gpu: Gpu, constants: Constants, factor: float) -> Estimate:
    """Predicted GPU time of a pass by cuDNN: what is computed, times what sizes measured ask for."""
    algorithm, failed = cudnn_algorithm(op, gpu)
    time_s, math_s, memory_s = _computed_s(op, gpu, constants)
    return from_datasheet(
        op,
        gpu,
        time_s * factor,
        _SPREAD if factor == 1.0 else _SPREAD_MEASURED[algorithm],
        math_s=math_s,
        memory_s=memory_s,
        kernel_family=f"cudnn {algorithm}",
        reason=f"cuDNN runs {algorithm}" + (f": {failed}" if failed else ""),
    )


@lru_cache(maxsize=4096)
def _measured_over_computed(op: Recurrent, gpu: Gpu, constants: Constants) -> float:
    """How many times as long cuDNN takes as is computed, around a layer's size; 1 where nothing is known.

    Leaving out each of the 2,432 sizes measured on an H200, the others halve the error: 16 to 7 % in the
    median.
    """
    measured = table(gpu)
    logarithm = 0.0
    for near in measured.by_cudnn(op) if measured else ():
        passes = (FORWARD,) if op.direction == FORWARD else (BACKWARD_DATA, BACKWARD_WEIGHT)
        layers = [replace(near.layer, direction=direction) for direction in passes]
        computed_s = sum(_computed_s(layer, gpu, constants)[0] for layer in layers)
        logarithm += near.weight * log(near.step_us * 1e-6 * near.layer.seq_len / computed_s)
    return exp(logarithm)


def _computed_s(op: Recurrent, gpu: Gpu, constants: Constants) -> tuple[float, float, float]:
    """GPU time of a pass by cuDNN, computed from its products and its steps; its part of math and of memory.

    The standard algorithm runs a product and a pointwise kernel per time step, layer and direction; on an
    H200 these take 4 to 15 us, but an eager call waits 10 us a step for the host to launch them (see
    :mod:`tilefit.cost.launch`). The weight gradient is one product over all time steps in either algorithm.
    """
    algorithm, _ = cudnn_algorithm(op, gpu)
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
        # Both include the input product, and in backward the weight gradient, which is priced apart.
        small = algorithm == PERSIST_STATIC_SMALL_H
        time_s = _small_hidden_s(op, gpu) if small else op.seq_len * _persistent_step_s(op, gpu)
        if op.direction == BACKWARD_DATA:
            gradient = replace(op, direction=BACKWARD_WEIGHT)
            time_s = max(time_s / 2, time_s - _products_s(gradient, gpu, constants))
        math_s = sum(e.math_s * count for e, count in products)
        memory_s = 0.0
    return time_s, math_s, memory_s
