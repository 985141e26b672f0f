"""Time of a whole step: the host launching against the GPU executing.

It is the time of a step among others: while the GPU finishes one, the host launches the next, so the slower
of the two sets the pace. Of 20 eager training steps that ran back to back on an H200 that is 4.8 % off in the
median and 11 % at worst (``benchmarks/whole_steps.py``); a step that begins with an idle GPU, as in a loop
that waits for each, would be 5.6 % and 15 % off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import hypot
from typing import NamedTuple

from tilefit.cost.estimate import BOUNDS, EXPOSED, LATENCY, LAUNCH, WAITS, Estimate, StepEstimate, Streams
from tilefit.cost.launch import (
    DTENSOR_S,
    GRAPHED_S,
    IDLE_S,
    PROGRAM_HOST,
    around_s,
    begin_s,
    fsdp_s,
    launch,
)
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import PricedGpu, priced
from tilefit.cost.streams import Timed, fabric_of, run
from tilefit.cost.waits import launches_block, own_work_s
from tilefit.gpus import Gpu
from tilefit.ops import OPTIMIZER, Gemm, Step
from tilefit.ops.step import Same

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
    the program lets it (:mod:`tilefit.cost.streams`).

    Args:
        step: The step.
        gpu: The GPU, or its name.
        estimates: Times of the step's operations, where they are known better (measured).
        launch_scale: Host time over what :mod:`tilefit.cost.launch` states; None: as found for the GPU.
        python_s: Host time beside the launches, on the stated host.
    """
    device = priced(gpu)
    estimates, timed = _timed(step, device, estimates, python_s)
    scale = device.launch_scale if launch_scale is None else launch_scale
    found = timed(scale)
    aside = set(found.streams.aside) if found.streams else ()
    widths: dict[tuple[str, str], float] = {}
    bound_s = dict.fromkeys((*BOUNDS, LAUNCH), 0.0)
    for index, predicted in enumerate(estimates):
        bound_s[predicted.bound] += predicted.time_s * (index not in aside)
        path = (predicted.kernel_family, predicted.bound)
        widths[path] = widths.get(path, 0.0) + (predicted.high_s - predicted.low_s) / 2
    unpaced_s = max(found.gpu_s, found.host_s)
    gpu_s = sum(bound_s.values())
    bound_s[LATENCY] += found.gpu_s - gpu_s  # between kernels
    bound_s[LAUNCH] = unpaced_s - found.gpu_s
    exchanged_s = 0.0
    if step.program:
        if found.streams:
            exchanged_s = sum(found.streams.exposed_s)
            bound_s[EXPOSED] = min(exchanged_s + found.streams.slowed_s, found.time_s - unpaced_s)
            exchanged_s -= sum(found.streams.late_s)  # of other ranks, which err as this one does
            exchanged_s *= fabric_of(step.program, device).link.spread
        bound_s[WAITS] = found.time_s - unpaced_s - bound_s.get(EXPOSED, 0.0)
    # Operations on the same path err alike, those on different paths independently; and all of a GPU alike.
    # What the host and the GPU may take at most and at least is priced like what they take.
    share = hypot(*widths.values(), device.common_spread * found.gpu_s) / (found.gpu_s or 1.0)
    spread = device.launch_spread * (PROGRAM_HOST if step.program.was_run else 1.0)
    less_s = found.time_s - timed(scale / spread, max(0.0, 1.0 - share)).time_s
    more_s = timed(scale * spread, 1.0 + share).time_s - found.time_s
    return StepEstimate(
        ops=estimates,
        time_s=found.time_s,
        low_s=max(found.time_s - hypot(less_s, exchanged_s), 0.0),
        high_s=found.time_s + hypot(more_s, exchanged_s),
        gpu_time_s=gpu_s,
        host_time_s=found.host_s,
        flop=step.flop,
        bound_time_s=bound_s,
        streams=found.streams,
        host_spread=spread,
    )


def step_s(step: Step, gpu: Gpu | str) -> float:
    """Predicted wall time of a step alone, as :func:`estimate_step` tells it with its interval and its parts,
    which take about as long again to predict."""
    device = priced(gpu)
    return _timed(step, device)[1](device.launch_scale).time_s


def _timed(
    step: Step, device: PricedGpu, estimates: Sequence[Estimate] | None = None, python_s: float = 0.0
) -> tuple[tuple[Estimate, ...], Callable[..., _Paced]]:
    """A step's operations and, by how many times as long host and GPU take as stated, its time."""
    if estimates is None:
        estimates = estimate_all((entry.op for entry in step.ops), device)
        if device.run is not None:
            estimates = [device.run.corrected(*pair) for pair in zip(step.ops, estimates, strict=True)]
    launches_s, times_s = _with_launches(step, device, [each.time_s for each in estimates])
    slower = 1.0 + python_s / (sum(launches_s) or 1.0)  # it goes with the launches, wherever the host waits
    return tuple(estimates), partial(_paced, step, device, [slower * each for each in launches_s], times_s)


class _Paced(NamedTuple):
    """A step's time, that of the stream that computes, idle between its kernels too, the host's, and how its
    streams run it."""

    time_s: float
    gpu_s: float
    host_s: float
    streams: Streams | None = None


def _paced(
    step: Step,
    device: PricedGpu,
    launches_s: Sequence[float],
    times_s: Sequence[float],
    scale: float,
    gpu_scale: float = 1.0,
) -> _Paced:
    """Host against GPU, with operations of these times, each of the two taking so many times as long."""
    program, own_s = step.program, own_work_s(step.program)
    gpu_s, host_s = gpu_scale * sum(times_s), scale * (own_s + sum(launches_s))
    if not (program.events or program.order or launches_block(program)):
        return _Paced(max(gpu_s, host_s), gpu_s, host_s)
    times_s = [gpu_scale * each for each in times_s]
    launches_s = [scale * each for each in launches_s]
    launches_s[:1] = [scale * own_s + first for first in launches_s[:1]]
    timed = Timed(program, launches_s, times_s)
    streams = run(timed, device, scale, list(_others(step, timed, device)))
    gpu_s -= sum(times_s[index] for index in streams.aside)  # beside the stream that computes
    host_s += scale * timed.asked_s
    return _Paced(max(gpu_s, host_s, streams.time_s), gpu_s, host_s, streams if program.order else None)


def _others(step: Step, timed: Timed, device: PricedGpu) -> Iterator[Timed]:
    """The other ranks that were run. What was changed in this one since is taken to be changed in them, with
    the same effect on their times."""
    known = {each.program.rank: _captured(Same(each), device) for each in step.ranks}
    own = known.pop(timed.program.rank, timed)
    launches, times = (
        sum(now) / (sum(before) or 1.0)
        for now, before in ((timed.launches_s, own.launches_s), (timed.times_s, own.times_s))
    )
    for each in known.values():
        yield Timed(each.program, [launches * s for s in each.launches_s], [times * s for s in each.times_s])


@lru_cache(_MOST_KNOWN)
def _captured(same: Same, device: PricedGpu) -> Timed:
    """A rank's step on a GPU, its host as it is stated. Rules price a step dozens of times, and its other
    ranks do not change meanwhile."""
    step = same.step
    times_s = [each.time_s for each in estimate_all((entry.op for entry in step.ops), device)]
    return Timed(step.program, *_with_launches(step, device, times_s))


def _with_launches(
    step: Step, device: PricedGpu, times_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """What the stated host takes to launch each operation, and what the GPU takes for it, idle between its
    kernels and before the next too."""
    begun: set[str] = set()
    launches_s, with_idle_s = [], []
    wrappers_s = _of_wrappers(step)
    for index, (entry, around, time_s) in enumerate(zip(step.ops, around_s(step), times_s, strict=True)):
        part = entry.phase.partition("-")[0]
        first_s = 0.0 if part in begun or entry.replayed else begin_s(part, step)
        begun.add(part)
        # The loss and the optimizer are outside of the graphs of a model's parts.
        of_parts = step.settings.cuda_graph and entry.site.module and entry.phase != OPTIMIZER
        replayed = entry.replayed or of_parts
        kernels, launch_s = launch(entry, device, step.settings)
        launch_s, idle_s = (GRAPHED_S, GRAPHED_S) if replayed else (launch_s, IDLE_S * kernels)
        launches_s.append(around + first_s + launch_s + wrappers_s[index])
        with_idle_s.append(time_s + idle_s)
    return launches_s, with_idle_s


def _of_wrappers(step: Step) -> dict[int, float]:
    """What the host takes for what wraps modules: products that several ranks share, collectives within those
    modules or around them, and those of ``fully_shard``; by the operation that follows."""
    found: dict[int, float] = defaultdict(float)
    modules = {*step.program.split}
    around = {name[:end] for name in modules for end in range(len(name) + 1) if name[end:][:1] in (".", "")}
    for index, entry in enumerate(step.ops):
        if isinstance(entry.op, Gemm) and entry.site.module in modules:
            found[index] += DTENSOR_S
    for each in step.program.exchanges:
        taken_s = fsdp_s() if each.copied else DTENSOR_S * (each.site.module in around)
        found[min(each.index, len(step.ops) - 1)] += taken_s
    return found
