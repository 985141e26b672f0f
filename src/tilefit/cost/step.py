"""Time of a whole step: the host launching against the GPU executing.

It is the time of a step among others: while the GPU finishes one, the host launches the next, so the slower
of the two sets the pace. Of 20 eager training steps that ran back to back on an H200 that is 4.8 % off in the
median and 11 % at worst (``benchmarks/whole_steps.py``); a step that begins with an idle GPU, as in a loop
that waits for each, would be 5.6 % and 15 % off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import hypot

from tilefit.cost.estimate import BOUNDS, EXPOSED, LAUNCH, WAITS, Estimate, StepEstimate, Streams
from tilefit.cost.launch import COLLECTIVE_S, GRAPHED_S, around_s, begin_s, launch
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import PricedGpu, priced
from tilefit.cost.streams import Timed, fabric_of, run
from tilefit.cost.waits import call_s, paced_s
from tilefit.gpus import Gpu
from tilefit.ops import OPTIMIZER, Step

#: Half-width of the 80 % interval of the time the GPU waits for the host: hosts differ by this much.
LAUNCH_SPREAD = 0.4
#: Ranks that were priced, with their steps, which keep the key theirs.
_KNOWN: dict[tuple[int, PricedGpu], tuple[Step, Timed]] = {}
_MOST_KNOWN = 64


def estimate_step(
    step: Step,
    gpu: Gpu | str,
    estimates: Sequence[Estimate] | None = None,
    *,
    launch_scale: float | None = None,
    python_s: float = 0.0,
) -> StepEstimate:
    """Predicted wall time of a step.

    The host launches operation after operation and runs ahead of the GPU, into the next step too, as far as
    the program lets it (:mod:`tilefit.cost.waits`).

    Args:
        step: The step.
        gpu: The GPU, or its name.
        estimates: Times of the step's operations, where they are known better (measured).
        launch_scale: Host time over what :mod:`tilefit.cost.launch` states; None: as found for the GPU.
        python_s: Host time beside the launches, on the stated host.
    """
    device = priced(gpu)
    if estimates is None:
        estimates = estimate_all((entry.op for entry in step.ops), device)
        if device.run is not None:
            estimates = [device.run.corrected(*pair) for pair in zip(step.ops, estimates, strict=True)]
    estimates = tuple(estimates)
    scale = device.launch_scale if launch_scale is None else launch_scale
    launches_s = [scale * each for each in _launches_s(step, device)]
    host_s = scale * python_s + sum(launches_s) + call_s(step.program, scale)
    gpu_s = sum(predicted.time_s for predicted in estimates)
    widths: dict[tuple[str, str], float] = {}
    bound_s = dict.fromkeys((*BOUNDS, LAUNCH), 0.0)
    for predicted in estimates:
        bound_s[predicted.bound] += predicted.time_s
        path = (predicted.kernel_family, predicted.bound)
        widths[path] = widths.get(path, 0.0) + (predicted.high_s - predicted.low_s) / 2
    streams = None
    if step.program is not None:
        launches_s[:1] = [scale * python_s + first for first in launches_s[:1]]
        times_s = [predicted.time_s for predicted in estimates]
        if step.program.order:
            timed = Timed(step.program, launches_s, times_s)
            streams = run(timed, device, scale, list(_others(step, timed, device)))
            for index in streams.aside:  # operations beside the stream that computes
                gpu_s -= times_s[index]
                bound_s[estimates[index].bound] -= times_s[index]
            host_s += scale * COLLECTIVE_S * len(step.program.exchanges)
            spread = fabric_of(step.program, device).link.spread
            widths["collective", EXPOSED] = spread * (sum(streams.exposed_s) - sum(streams.late_s))
    time_s = max(gpu_s, host_s)
    bound_s[LAUNCH] = time_s - gpu_s
    if step.program is not None:
        paced = streams.time_s if streams else paced_s(step.program, launches_s, times_s, device, scale)
        paced = max(time_s, paced)
        if streams:
            bound_s[EXPOSED] = min(sum(streams.exposed_s), paced - time_s)
        bound_s[WAITS] = paced - time_s - bound_s.get(EXPOSED, 0.0)
        time_s = paced
    waited_s = time_s - gpu_s - bound_s.get(EXPOSED, 0.0)
    width = _half_width(widths, device, gpu_s, waited_s, streams)
    return StepEstimate(
        ops=estimates,
        time_s=time_s,
        low_s=max(time_s - width, 0.0),
        high_s=time_s + width,
        gpu_time_s=gpu_s,
        host_time_s=host_s,
        flop=step.flop,
        bound_time_s=bound_s,
        streams=streams,
    )


def _half_width(
    widths: Mapping[tuple[str, str], float],
    device: PricedGpu,
    gpu_s: float,
    waited_s: float,
    streams: Streams | None,
) -> float:
    """Of the interval. Operations on the same path err alike, those on different paths independently; and
    all of a GPU alike. Other ranks that are waited for err as this one does."""
    width = hypot(*widths.values(), device.common_spread * gpu_s, LAUNCH_SPREAD * waited_s)
    late_s = sum(streams.late_s) if streams is not None else 0.0
    return width * (1 + late_s / gpu_s) if late_s else width


def _others(step: Step, timed: Timed, device: PricedGpu) -> Iterator[Timed]:
    """The other ranks that were run. What was changed in this one since is taken to be changed in them, with
    the same effect on their times."""
    known = {each.program.rank: _captured(each, device) for each in step.ranks if each.program is not None}
    own = known.pop(timed.program.rank, timed)
    launches, times = (
        sum(now) / (sum(before) or 1.0)
        for now, before in ((timed.launches_s, own.launches_s), (timed.times_s, own.times_s))
    )
    for each in known.values():
        yield Timed(each.program, [launches * s for s in each.launches_s], [times * s for s in each.times_s])


def _captured(step: Step, device: PricedGpu) -> Timed:
    """A rank's step on a GPU, its host as it is stated. Rules price a step dozens of times, and its other
    ranks do not change meanwhile."""
    key = id(step), device
    if key not in _KNOWN:
        assert step.program is not None
        times_s = [each.time_s for each in estimate_all((entry.op for entry in step.ops), device)]
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = step, Timed(step.program, list(_launches_s(step, device)), times_s)
    return _KNOWN[key][1]


def _launches_s(step: Step, device: PricedGpu) -> Iterator[float]:
    """Of each operation, what the stated host takes to launch it."""
    begun: set[str] = set()
    for entry, around in zip(step.ops, around_s(step), strict=True):
        part = entry.phase.partition("-")[0]
        first_s = 0.0 if part in begun else begin_s(part, step)
        begun.add(part)
        # The loss and the optimizer are outside of the graphs.
        replayed = step.settings.cuda_graph and entry.site.module and entry.phase != OPTIMIZER
        launch_s = GRAPHED_S if replayed else launch(entry.op, entry.phase, device, step.settings).host_s
        yield around + first_s + launch_s
