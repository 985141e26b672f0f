"""Time of recurrent layers of ``tilefit.nn`` where the persistent kernels run them.

Predicted from what was measured: :mod:`tilefit.cost.recurrent_times`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tilefit.cost import recurrent_times
from tilefit.cost.constants import Constants
from tilefit.cost.estimate import Estimate, from_datasheet
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.memory import floor_s
from tilefit.cost.recurrent import estimate_recurrent
from tilefit.cost.recurrent_times import Row
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent
from tilefit.ops.recurrent import TRAINING

#: Half-width of the 80 % interval: sizes between those measured take what the nearest one took.
_SPREAD = 0.3


class Steps(NamedTuple):
    """GPU time of the persistent kernels for a layer.

    Attributes:
        row: The size that was measured.
        forward_us, backward_us: A time step of one layer and direction, with its share of the products with
            the input and of the weights' gradients; ``backward_us`` is 0 in inference.
    """

    row: Row
    forward_us: float
    backward_us: float


@lru_cache(maxsize=4096)
def persistent_steps(op: Recurrent, gpu: Gpu) -> Steps | None:
    """What a layer's time steps take by the persistent kernels; None where cuDNN runs it.

    The layer runs by what is faster in eager calls; its times are those of the nearest size in CUDA graphs,
    which leave out what the host does.
    """
    measured = recurrent_times.table(gpu)
    if not op.persistent or op.proj_size or measured is None:
        return None
    layer, training = replace(op, direction=FORWARD), op.persistent == TRAINING
    choice = measured.nearest(layer, op.dtype, training=training)
    forward = measured.persistent(layer, training=False, captured=True)
    if choice is None or forward is None or not choice.is_faster:
        return None
    if not training:
        return Steps(*forward, 0.0)
    both = measured.persistent(layer, training=True, captured=True)
    return None if both is None else Steps(both[0], forward[1], max(both[1] - forward[1], 0.0))


def estimate_layers(op: Recurrent, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted GPU time of a recurrent layer's pass, by whatever runs it.

    Layers, and the two directions of one, count one after another. Of the backward pass the weights'
    gradients are priced as products, the rest is what is left of the time measured.
    """
    steps = persistent_steps(op, gpu)
    if steps is None or op.direction == BACKWARD_WEIGHT:
        return estimate_recurrent(op, gpu, constants)

    def products_s(of: Recurrent) -> float:
        return sum(estimate_gemm(gemm, gpu, constants).time_s * count for gemm, count in of.gemms())

    recurrences = op.seq_len * op.num_layers * op.directions
    if op.direction == BACKWARD_DATA:
        time_s = recurrences * steps.backward_us * 1e-6
        time_s = max(time_s / 2, time_s - products_s(replace(op, direction=BACKWARD_WEIGHT)))
    else:
        time_s = recurrences * steps.forward_us * 1e-6
    # Measured with as many input features as hidden units.
    time_s += products_s(op) - products_s(replace(op, input_size=op.hidden_size))
    floor = floor_s(op, gpu)
    time_s = max(time_s, floor)
    math_s = sum(estimate_gemm(gemm, gpu, constants).math_s * count for gemm, count in op.gemms())
    row = steps.row
    return from_datasheet(
        time_s,
        floor,
        _SPREAD,
        busy_s=min(math_s, time_s),
        math_s=math_s,
        memory_s=0.0,
        kernel_family="tilefit persistent",
        reason=f"measured with {row.hidden} units, mini-batch {row.batch}, {row.steps} steps",
    )
