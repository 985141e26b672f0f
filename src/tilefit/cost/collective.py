"""Time of communication between the GPUs of one machine: the bytes over the link's datasheet bandwidth."""

from __future__ import annotations

from tilefit.cost.analytic import estimates
from tilefit.cost.constants import Constants
from tilefit.cost.estimate import MEMORY, Estimate
from tilefit.gpus import Gpu
from tilefit.ops import Collective

#: GPUs that one machine joins by their own links: an HGX board, or a server's PCIe slots, has at most eight.
#: Communication between more is by a network that tilefit knows nothing about.
MOST_LINKED = 8
#: The interval reaches up to this multiple of the prediction. A choice: nothing was measured here, libraries
#: stay below the link's bandwidth, and small messages wait for latencies that this model leaves out.
_SLOWEST = 3.0


def is_priced(op: Collective, gpu: Gpu) -> bool:
    """Whether anything is known of the link that the ranks communicate over."""
    return bool(gpu.link_bandwidth_bytes_per_s) and op.ranks <= MOST_LINKED


@estimates(Collective)
def estimate_collective(op: Collective, gpu: Gpu, constants: Constants) -> Estimate:
    """The least time that the link allows; no time at all where the link is unknown.

    The published bandwidth of a link counts both directions, and a ring sends and receives at once: half of
    it is what one GPU sends at most. Latency, the library's efficiency and a switch that reduces on the way
    are left out.
    """
    if not is_priced(op, gpu):
        return Estimate(0.0, 0.0, 0.0, MEMORY, kernel_family="collective", reason="not priced")
    time_s = op.link_bytes / (gpu.link_bandwidth_bytes_per_s / 2)
    return Estimate(
        time_s=time_s,
        low_s=time_s,
        high_s=_SLOWEST * time_s,
        bound=MEMORY,
        memory_s=time_s,
        kernel_family="collective",
        reason=f"{gpu.link} moves {gpu.link_bandwidth_bytes_per_s / 2e9:.0f} GB/s each way at most",
    )
