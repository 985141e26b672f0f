"""Time of communication between the GPUs of one machine; several machines: :mod:`tilefit.cost.links`."""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost.analytic import estimates, from_datasheet
from tilefit.cost.constants import Constants
from tilefit.cost.estimate import MEMORY, Estimate
from tilefit.cost.links import SUMMED, Fabric, Group
from tilefit.gpus import Gpu
from tilefit.ops import Collective
from tilefit.ops.dtypes import size_bytes
from tilefit.options import MOST_LINKED


def is_priced(op: Collective, gpu: Gpu) -> bool:
    """Whether anything is known of the link that the ranks communicate over."""
    return op.ranks <= MOST_LINKED and Fabric(gpu).reaches(Group(op.ranks, op.ranks))


@estimates(Collective)
def estimate_collective(op: Collective, gpu: Gpu, constants: Constants) -> Estimate:
    """The time of the library's best protocol, nothing else running; none where the link is unknown."""
    if not is_priced(op, gpu):
        return Estimate(0.0, 0.0, 0.0, MEMORY, kernel_family="collective", reason="not priced")
    fabric = Fabric(gpu)
    link, size, group = fabric.link, op.elements * size_bytes(op.dtype), Group(op.ranks, op.ranks)
    time_s = fabric.time_s(op.function, size, group, sums=op.dtype in SUMMED)
    rate, most = op.link_bytes / time_s / 1e9, gpu.link_bandwidth_bytes_per_s / 2e9
    found = from_datasheet(
        op, gpu, time_s, link.spread, math_s=0.0, memory_s=time_s, kernel_family="collective"
    )
    reason = f"{gpu.link} at {rate:.0f} GB/s each way, of {most:.0f}"
    return replace(found, provenance=link.provenance, reason=reason)
