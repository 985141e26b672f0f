"""Recurrent layers whose weights stay on chip: all time steps of a layer in one launch.

The kernels are CUDA C++ (``common.cuh`` explains the exchange between thread blocks), compiled at first use
for the GPU found (:mod:`~tilefit.rnn.persistent.build`), cut to size by
:mod:`~tilefit.rnn.persistent.variant` and launched by :mod:`~tilefit.rnn.persistent.launch`. The layouts of
all tensors are those of :mod:`tilefit.rnn.reference`.
"""

from tilefit.rnn.persistent.layer import backward, forward, has_bindings, refusal

__all__ = ["backward", "forward", "has_bindings", "refusal"]
