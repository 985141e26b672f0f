"""Time of a whole step: the host launching against the GPU executing."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot

from tilefit.cost.estimate import BOUNDS, LAUNCH, Estimate, StepEstimate
from tilefit.cost.launch import GRAPHED_S, around_s, begin_s, launch
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import priced
from tilefit.gpus import Gpu
from tilefit.ops import OPTIMIZER, Step

#: Half-width of the 80 % interval of the time the GPU waits for the host: hosts differ by this much.
_LAUNCH_SPREAD = 0.4


def estimate_step(
    step: Step,
    gpu: Gpu | str,
    estimates: Sequence[Estimate] | None = None,
    *,
    launch_scale: float | None = None,
    python_s: float = 0.0,
) -> StepEstimate:
    """Predicted wall time of a step.

    The host launches operation after operation and runs ahead; the GPU starts each one when it has been
    launched and the one before has finished. The time is when the last one finishes.

    Args:
        step: The step.
        gpu: The GPU, or its name.
        estimates: Times of the step's operations, where they are known better (measured).
        launch_scale: Host time over what :mod:`tilefit.cost.launch` states; None: as found for the GPU.
        python_s: Host time beside the launches, spread evenly over the operations, on the stated host.
    """
    device = priced(gpu)
    if estimates is None:
        estimates = estimate_all((entry.op for entry in step.ops), device)
        if device.run is not None:
            estimates = [device.run.corrected(*pair) for pair in zip(step.ops, estimates, strict=True)]
    estimates = tuple(estimates)
    scale = device.launch_scale if launch_scale is None else launch_scale
    beside_s = python_s / max(1, len(step.ops))
    host_s = free_s = gpu_s = 0.0
    widths: dict[tuple[str, str], float] = {}
    bound_s = dict.fromkeys((*BOUNDS, LAUNCH), 0.0)
    begun: set[str] = set()
    for entry, predicted, around in zip(step.ops, estimates, around_s(step), strict=True):
        part = entry.phase.partition("-")[0]
        if part not in begun:
            begun.add(part)
            host_s += scale * begin_s(part, step)
        # The loss and the optimizer are outside of the graphs.
        replayed = step.settings.cuda_graph and entry.site.module and entry.phase != OPTIMIZER
        kernels, launch_s = launch(entry.op, entry.phase, device, step.settings)
        launch_s = scale * (GRAPHED_S if replayed else launch_s)
        host_s += scale * (around + beside_s)
        count = max(1, kernels)
        # The first kernel can start when it is launched, the last one when all are.
        start_s = max(free_s, host_s + launch_s / count)
        host_s += launch_s
        free_s = max(start_s + predicted.time_s, host_s + predicted.time_s / count)
        gpu_s += predicted.time_s
        bound_s[predicted.bound] += predicted.time_s
        path = (predicted.kernel_family, predicted.bound)
        widths[path] = widths.get(path, 0.0) + (predicted.high_s - predicted.low_s) / 2
    bound_s[LAUNCH] = free_s - gpu_s
    # Operations on the same path err alike, those on different paths independently.
    width = hypot(*widths.values(), _LAUNCH_SPREAD * bound_s[LAUNCH])
    return StepEstimate(
        ops=estimates,
        time_s=free_s,
        low_s=max(free_s - width, 0.0),
        high_s=free_s + width,
        gpu_time_s=gpu_s,
        host_time_s=host_s,
        flop=step.flop,
        bound_time_s=bound_s,
    )
