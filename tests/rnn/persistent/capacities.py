"""GPUs to cut kernels for, without having one."""

from __future__ import annotations

from tilefit.rnn.persistent.variant import Capacity

#: An H200: what `tilefit.rnn.persistent.launch.capacity` finds there.
H200 = Capacity(132, (66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7))

#: An A100 SXM: no clusters.
A100 = Capacity(108)
