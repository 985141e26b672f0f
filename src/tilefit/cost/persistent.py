"""Which recurrent layers of ``tilefit.nn`` the persistent kernels run, and what a time step takes there.

Predicted from what was measured: :mod:`tilefit.cost.recurrent_times`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tilefit.cost import recurrent_times
from tilefit.cost.recurrent_times import Row
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, Recurrent
from tilefit.ops.recurrent import TRAINING


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
