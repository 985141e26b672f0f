"""Time of recurrent layers: by cuDNN's algorithms, and by the persistent kernels of ``tilefit.nn``."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import exp, log
from typing import NamedTuple

from tilefit.cost.analytic import estimates, from_datasheet
from tilefit.cost.constants import Constants
from tilefit.cost.cudnn import PERSIST_STATIC, PERSIST_STATIC_SMALL_H, STANDARD, cudnn_algorithm
from tilefit.cost.estimate import Estimate
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.gemm import kernels as product_kernels
from tilefit.cost.launch import counts, launches
from tilefit.cost.recurrent_times import persistent_steps, table
from tilefit.cost.streaming import estimate_streaming
from tilefit.cost.tables import facts
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent, StepOp, Streaming
from tilefit.ops.dtypes import HALVES, size_bytes

#: What was measured of cuDNN's algorithms and of the persistent kernels, with the sources.
_KNOWN = facts("recurrent/cudnn")
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
def launch_recurrent(op: Recurrent, phase: str, gpu: Gpu, compiled: bool) -> tuple[int, float]:
    """One call, in which the standard algorithm takes the host's time for each step."""
    if persistent_steps(op, gpu) is not None:
        return PERSISTENT_KERNELS * op.num_layers, RECURRENT_S * op.num_layers
    stepwise = cudnn_algorithm(op, gpu)[0] == STANDARD and op.direction != BACKWARD_WEIGHT
    each_s = RECURRENT_STEP_S if op.direction == FORWARD else RECURRENT_BACKWARD_STEP_S
    steps = op.seq_len * op.num_layers * op.directions * stepwise
    return kernels(op, gpu), RECURRENT_S + steps * each_s


@counts(Recurrent)
def count_recurrent(op: Recurrent, gpu: Gpu, entry: StepOp) -> int:
    """Those that are launched, whatever the host's time."""
    return launch_recurrent(op, entry.phase, gpu, False)[0]


@estimates(Recurrent)
def estimate_recurrent(op: Recurrent, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted GPU time of a recurrent layer's pass, by whatever runs it.

    Layers, and the two directions of one, count one after another. Of the backward pass the weights'
    gradients are priced as products, the rest is what is left of the time measured.
    """
    steps = persistent_steps(op, gpu)
    if steps is None or op.direction == BACKWARD_WEIGHT:
        return _by_cudnn(op, gpu, constants, 1.0 if steps else _measured_over_computed(op, gpu, constants))
    backward = op.direction == BACKWARD_DATA
    step_s = (steps.backward_us if backward else steps.forward_us) * 1e-6
    time_s = op.seq_len * op.num_layers * op.directions * step_s
    if backward:
        time_s = _without_weights(op, time_s, gpu, constants)
    # Measured with as many input features as hidden units.
    square = replace(op, input_size=op.hidden_size)
    own = _products(op, gpu, constants)
    time_s += own.time_s - _products(square, gpu, constants).time_s
    row, spread = steps.row, _KNOWN.spread_persistent
    parts = {"math_s": own.math_s, "memory_s": 0.0, "busy_s": min(own.math_s, time_s)}
    reason = f"measured with {row.hidden} units, mini-batch {row.batch}, {row.steps} steps"
    family = "tilefit persistent"
    return from_datasheet(op, gpu, time_s, spread, **parts, kernel_family=family, reason=reason)


class _Taken(NamedTuple):
    """GPU time, and what arithmetic and traffic alone would take of it."""

    time_s: float
    math_s: float
    memory_s: float


def _products(op: Recurrent, gpu: Gpu, constants: Constants) -> _Taken:
    """Those of all products of a pass."""
    found = [(estimate_gemm(gemm, gpu, constants), count) for gemm, count in op.gemms()]
    return _Taken(*(sum(getattr(e, part) * count for e, count in found) for part in _Taken._fields))


def _without_weights(op: Recurrent, both_s: float, gpu: Gpu, constants: Constants) -> float:
    """What a backward pass takes beside the weights' gradients, which are priced apart."""
    weights_s = _products(replace(op, direction=BACKWARD_WEIGHT), gpu, constants).time_s
    return max(both_s / 2, both_s - weights_s)


def _persistent_step_s(op: Recurrent, gpu: Gpu) -> float:
    """One time step of a persistent kernel: the H200's table, interpolated in the logarithms of its sizes,
    scaled to the GPU's SMs and clock."""
    import numpy as np

    known = _KNOWN.persist_static

    def at(passes: str) -> float:
        rows = np.log(known["lstm" if op.gates > 1 else "vanilla"][passes])
        of_batch = [np.interp(log(op.batch), np.log(known["batch"]), row) for row in rows]
        return exp(float(np.interp(log(op.hidden_size), np.log(known["hidden"]), of_batch)))

    us = at("forward") if op.direction == FORWARD else at("both") - at("forward")
    slower: float = max(1.0, known["sms"] / gpu.sms) * known["clock_hz"] / gpu.boost_clock_hz
    return us * 1e-6 * slower


def _small_hidden_s(op: Recurrent, gpu: Gpu) -> float:
    """A pass of the small-hidden algorithm, one layer and direction after another."""
    small, weights = _KNOWN.small_hidden, 4 * op.gates * op.hidden_size**2
    way = "registers" if weights < small["registers_bytes"] else "L2"
    if op.dtype == "fp16" and op.batch >= small["tensor_batch"]:
        way = "Tensor Cores"
    least_s, per_clock = small["step"][way]
    step_s = least_s + weights / (per_clock * gpu.boost_clock_hz)
    began_s = small["begin_s"] + weights * small["load_s_per_byte"]
    passed_s: float = op.num_layers * op.directions * (began_s + op.seq_len * step_s)
    return passed_s


def _by_cudnn(op: Recurrent, gpu: Gpu, constants: Constants, factor: float) -> Estimate:
    """Predicted GPU time of a pass by cuDNN: what is computed, times what sizes measured ask for."""
    algorithm, failed = cudnn_algorithm(op, gpu)
    computed = _computed(op, gpu, constants)
    spread = _KNOWN.spread if factor == 1.0 else _KNOWN.spread_measured[algorithm]
    parts = {"math_s": computed.math_s, "memory_s": computed.memory_s}
    family, reason = f"cudnn {algorithm}", f"cuDNN runs {algorithm}" + (f": {failed}" if failed else "")
    time_s = computed.time_s * factor
    return from_datasheet(op, gpu, time_s, spread, **parts, kernel_family=family, reason=reason)


@lru_cache(maxsize=4096)
def _measured_over_computed(op: Recurrent, gpu: Gpu, constants: Constants) -> float:
    """How many times as long cuDNN takes as is computed, around a layer's size; 1 where nothing is known.

    Leaving out each of the 2,432 sizes measured on an H200, the others halve the error: 16 to 7 % in the
    median.
    """
    measured = table(gpu)
    logarithm = 0.0
    for weight, near, step_us in measured.by_cudnn(op) if measured else ():
        passes = (FORWARD,) if op.direction == FORWARD else (BACKWARD_DATA, BACKWARD_WEIGHT)
        layers = [replace(near, direction=direction) for direction in passes]
        computed_s = sum(_computed(layer, gpu, constants).time_s for layer in layers)
        logarithm += weight * log(step_us * 1e-6 * near.seq_len / computed_s)
    return exp(logarithm)


def _computed(op: Recurrent, gpu: Gpu, constants: Constants) -> _Taken:
    """What a pass by cuDNN takes, computed from its products and its steps.

    The standard algorithm runs a product and a pointwise kernel per time step, layer and direction; on an
    H200 these take 4 to 15 us, but an eager call waits 10 us a step for the host to launch them (see
    :mod:`tilefit.cost.launch`). The weight gradient is one product over all time steps in either algorithm.
    """
    algorithm, _ = cudnn_algorithm(op, gpu)
    products = _products(op, gpu, constants)
    if op.direction == BACKWARD_WEIGHT:
        return products
    if algorithm == STANDARD:
        # The gates and the cell state in, the hidden and the cell state out.
        cells = op.batch * op.hidden_size
        read = cells * (op.gates + 1) * size_bytes(op.dtype)
        written = 2 * cells * size_bytes(op.dtype) * (1 if op.direction == FORWARD else op.gates)
        gates = Streaming("pointwise", cells * op.gates, read, written, op.dtype, 10.0)
        steps = op.seq_len * op.num_layers * op.directions
        gates_s = steps * estimate_streaming(gates, gpu, constants).time_s
        return products._replace(time_s=products.time_s + gates_s)
    # Both include the input product, and in backward the weight gradient.
    small = algorithm == PERSIST_STATIC_SMALL_H
    time_s = _small_hidden_s(op, gpu) if small else op.seq_len * _persistent_step_s(op, gpu)
    if op.direction == BACKWARD_DATA:
        time_s = _without_weights(op, time_s, gpu, constants)
    return _Taken(time_s, products.math_s, 0.0)


# --- how many kernels cuDNN launches ---------------------------------------------------------------------
#
# Read off the kernels of 640 calls on an H200 (torch 2.11, cuDNN 9.19; benchmarks/launch_counts.py). The
# standard algorithm runs a product and the gates in each step of each layer and direction. All else is a few
# products over many steps: where layers lie upon each other, so that they overlap, over some steps at once;
# the weights' gradients of packed sequences over steps that have as many samples.


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
    if algorithm == PERSIST_STATIC:  # the weights' gradients are as of the others
        return cells * (3 if op.direction == FORWARD else 5) + split + states
    # The input's product, all steps in one, and forward a GRU's bias or backward what is left of the gates.
    return cells * (2 + (op.direction == BACKWARD_DATA or op.mode == "GRU")) + split + dropout + states


def _chunks(op: Recurrent) -> int:
    """How many products over several steps each layer's input takes."""
    if op.num_layers == 1 or op.bidirectional:
        return 1
    steps: int = next(steps for batch, steps in _KNOWN.at_once[op.direction] if op.batch <= batch)
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
