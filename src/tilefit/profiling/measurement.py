"""From a profiled run to a report: every operation with its measured time, and the rules on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from statistics import median
from typing import NamedTuple

from tilefit.assessment import Assessment
from tilefit.cost import MEMORY, Estimate, StepEstimate, estimate_step, step_s
from tilefit.cost.measured import MeasuredRun, MeasuredTime
from tilefit.cost.priced import PricedGpu
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.ops import OPTIMIZER, Op, Parameter, Settings, Site, Step, StepOp, TensorRef
from tilefit.options import Selection
from tilefit.profiling.attribution import AttributedStep, attribute
from tilefit.profiling.inductor import Compiled
from tilefit.profiling.joining import join
from tilefit.profiling.kernel_names import older_path, read_name
from tilefit.profiling.operations import Operations, Unit, renumbered
from tilefit.profiling.trace import KERNEL, RANGE, Kernel, Trace
from tilefit.report import Report
from tilefit.report.report import HostWait, MeasuredOp, MeasuredStep
from tilefit.units import seconds

_NS = 1e-9
#: Launch costs are searched between these multiples of the model's.
_LAUNCH_SCALES = (0.0, 20.0)
#: A run is told to be longer than what explains it where it is by this factor. A choice.
_UNEXPLAINED = 1.05


@dataclass(frozen=True, slots=True)
class Live:
    """What is known of the program beside its trace.

    Attributes:
        name: What was profiled, for headings.
        parameters, modules: As of :class:`~tilefit.ops.Step`; empty where unknown.
        plain_s: Wall times of steps without the profiler; empty where not measured.
        compiled: What was compiled while the program was watched.
    """

    name: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    plain_s: tuple[float, ...] = ()
    compiled: Compiled | None = None


class Measured(NamedTuple):
    """A report, and the steps it is made of."""

    report: Report
    steps: list[AttributedStep]


def measure(
    trace: Trace, gpu: PricedGpu, live: Live, captured: Step | None = None, selection: Selection | None = None
) -> Measured:
    """The report of a profiled run.

    Args:
        trace: What the profiler saw.
        gpu: The GPU it ran on.
        live: What else is known.
        captured: The step that was run, captured beforehand; without it the operations are the trace's.
        selection: Which findings are wanted.

    Raises:
        TilefitError: nothing in the trace's steps ran on the GPU.
    """
    steps = [step for step in attribute(trace) if step.calls]
    if not steps:
        raise TilefitError(
            "no step of this trace ran anything on the GPU",
            hint="Record it with ProfilerActivity.CUDA among the activities.",
        )
    if live.compiled is not None:
        live.compiled.place(steps)
    names = " ".join({kernel.name for kernel in trace.kernels}).lower()
    operations = Operations(tf32_matmul="tf32" in names)
    units = [[unit for call in step.calls for unit in operations.units(call)] for step in steps]
    windows = _windows(steps)
    middle = sorted(range(len(steps)), key=lambda number: windows[number][1] - windows[number][0])
    typical = middle[len(steps) // 2]
    step, unmatched_from = _reference(units[typical], captured, live, trace)
    rows = [_summed(step, of_step) for of_step in units]
    times = [_measured_time(index, rows) for index in range(len(step.ops))]
    predicted = estimate_step(step, gpu)
    wall_s = [(end - start) * _NS for start, end in windows]
    run = MeasuredRun(step, times, predicted.ops)
    as_run = replace(gpu, run=run)
    _fit_launches(run, step, as_run, median(live.plain_s or wall_s))
    report = Assessment(step, as_run, selection or Selection()).report
    done = rows[typical]
    ops = tuple(
        replace(row, measured=_measured_op(entry.op, times[index], estimate, done[index], gpu))
        for index, (row, entry, estimate) in enumerate(zip(report.ops, step.ops, predicted.ops, strict=True))
    )
    memory_bound = (units for units, op in zip(done, predicted.ops, strict=True) if op.bound == MEMORY)
    attributed = (u for u in units[typical] if u.call.module is not None or u.phase == OPTIMIZER)
    parts = {
        "attributed_s": _time_s(attributed),
        "memory_bound_s": _time_s(chain.from_iterable(memory_bound)),
        "unmatched_s": _time_s(chain.from_iterable(done[unmatched_from:])),
    }
    summary = _summary(steps[typical], windows[typical], gpu, predicted, live, wall_s, **parts)
    notes = report.notes
    if summary.time_s > _UNEXPLAINED * report.step.time_s:
        ran, explained = seconds(summary.time_s), seconds(report.step.time_s)
        notes += (
            f"A step of the run took {ran}, of which the GPU and launches explain {explained}: for the rest "
            "the host did something else, such as loading data. What a change saves is of what is explained.",
        )
    return Measured(replace(report, ops=ops, measured=summary, notes=notes), steps)


# ---- the operations ------------------------------------------------------------------------------


def _reference(units: Sequence[Unit], captured: Step | None, live: Live, trace: Trace) -> tuple[Step, int]:
    """The step whose operations the times belong to, and where those begin that were not captured."""
    numbers = count(
        1 + max((ref.id for op in captured.ops for ref in op.outputs), default=0) if captured else 0
    )
    if captured is None:
        return _derived(units, live, trace, numbers), len(units)
    known = join(captured.ops, units)
    extra = [_entry(unit, live, numbers) for unit, index in zip(units, known, strict=True) if index is None]
    return replace(captured, ops=(*captured.ops, *extra)), len(captured.ops)


def _derived(units: Sequence[Unit], live: Live, trace: Trace, numbers: count[int]) -> Step:
    """A step made of what the trace says, without memory and without the flow of data."""
    ranges = (event.name for event in trace.events if event.kind == RANGE)
    step = next((name for name in ranges if name.startswith("Optimizer.step#")), "")
    optimizer = step.partition("#")[2].partition(".")[0].lower()
    notes = ["The operations are those of the profiled run; which of them feed which is not known."]
    if not trace.has_shapes:
        notes.append(
            "The trace has no shapes, so rates, bounds and most rules are missing: record it with "
            "record_shapes=True."
        )
    return Step(
        ops=tuple(_entry(unit, live, numbers) for unit in units),
        settings=Settings(
            training=any(unit.phase != "forward" for unit in units),
            optimizer=optimizer,
            compiled=any(unit.call.graph for unit in units),
            cuda_graph=any(unit.call.replayed for unit in units),
        ),
        parameters=live.parameters,
        modules=live.modules,
        model=live.name,
        notes=tuple(notes),
    )


def _entry(unit: Unit, live: Live, numbers: count[int]) -> StepOp:
    inputs, outputs = renumbered(unit, numbers)
    module = unit.call.module or ""
    site, name = Site(module, unit.call.source), unit.call.name.replace("::", ".")
    inputs = tuple(_named(ref, module, live.parameters) for ref in inputs)
    return StepOp(unit.op, unit.phase, site, name, inputs, outputs, unit.call.recomputed)


def _named(ref: TensorRef, module: str, parameters: Mapping[str, Parameter]) -> TensorRef:
    """The tensor with the name of the module's own parameter that has its sizes, if there is one."""
    prefix = f"{module}." if module else ""
    for name, parameter in parameters.items():
        is_own = name.startswith(prefix) and "." not in name.removeprefix(prefix)
        if is_own and ref.shape in (parameter.shape, parameter.shape[::-1]):
            return replace(ref, parameter=name)
    return ref


def _summed(step: Step, units: Sequence[Unit]) -> list[list[Unit]]:
    """The units of one step by operation of the reference step."""
    done: list[list[Unit]] = [[] for _ in step.ops]
    for unit, index in zip(units, join(step.ops, units), strict=True):
        if index is not None:
            done[index].append(unit)
    return done


def _measured_time(index: int, rows: Sequence[list[list[Unit]]]) -> MeasuredTime:
    """Over the steps; an operation that nothing ran for took no time of its own."""
    taken = [_time_s(row[index]) for row in rows]
    return MeasuredTime(median(taken), min(taken), max(taken))


def _measured_op(
    op: Op, time: MeasuredTime, predicted: Estimate, units: Sequence[Unit], gpu: Gpu
) -> MeasuredOp | None:
    kernels = [kernel for unit in units for kernel in unit.kernels]
    if not kernels:
        return None
    read = [read_name(kernel.name) for kernel in kernels if kernel.kind == KERNEL]
    uses = [name.tensor_core for name in read]
    known_bytes = op.moved_bytes > 0
    floor_s = op.moved_bytes / gpu.memory_bandwidth_bytes_per_s
    if op.multiplies:
        floor_s = max(floor_s, op.flop / gpu.peak_flop_per_s(op.dtype))
    return MeasuredOp(
        predicted_s=predicted.time_s,
        kernels=tuple(read_name(k.name).short if k.kind == KERNEL else k.name for k in kernels),
        tensor_core=True if True in uses else None if None in uses else False,
        older_path=any(older_path(name, gpu.compute_capability) for name in read),
        flop_per_s=op.flop / time.time_s if time.time_s and op.multiplies else 0.0,
        bytes_per_s=op.moved_bytes / time.time_s if time.time_s else 0.0,
        roof_share=floor_s / time.time_s if time.time_s and known_bytes else 0.0,
    )


def _fit_launches(run: MeasuredRun, step: Step, gpu: PricedGpu, wall_s: float) -> None:
    """Choose how slow the host is taken to be, so that the priced step takes the measured wall time."""

    def time_s(scale: float) -> float:
        run.launch_scale = scale
        return step_s(step, gpu)

    low, high = _LAUNCH_SCALES
    if time_s(low) >= wall_s:
        high = low
    elif time_s(high) > wall_s:
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if time_s(middle) < wall_s else (low, middle)
    run.launch_scale = high


# ---- totals --------------------------------------------------------------------------------------


def _windows(steps: Sequence[AttributedStep]) -> list[tuple[int, int]]:
    """When the GPU was at each step: from the end of the one before, or its own start, to its last kernel."""
    windows = []
    done_ns = 0
    for step in steps:
        start = max(step.start_ns, done_ns)
        done_ns = max(kernel.end_ns for call in step.calls for kernel in call.kernels)
        windows.append((start, max(done_ns, start)))
    return windows


def _time_s(ran: Iterable[Unit | Kernel]) -> float:
    """What kernels, or the kernels of operations, took together, in seconds."""
    return _NS * sum(part.duration_ns for part in ran)


def _summary(
    step: AttributedStep,
    window: tuple[int, int],
    gpu: Gpu,
    predicted: StepEstimate,
    live: Live,
    wall_s: Sequence[float],
    **parts: float,
) -> MeasuredStep:
    """The totals of one step; given are the parts that need its operations."""
    kernels = sorted(
        (kernel for call in step.calls for kernel in call.kernels), key=lambda kernel: kernel.start_ns
    )
    here = [kernel for kernel in kernels if kernel.device == kernels[0].device]
    talking = [kernel for kernel in here if _communicates(kernel)]
    working = [kernel for kernel in here if not _communicates(kernel)]
    read = [(kernel, read_name(kernel.name)) for kernel in kernels if kernel.kind == KERNEL]
    tensor = [(kernel, name) for kernel, name in read if name.tensor_core]
    plain_s = live.plain_s or wall_s
    return MeasuredStep(
        source=live.name,
        steps=len(wall_s),
        time_s=median(plain_s),
        low_s=min(plain_s),
        high_s=max(plain_s),
        profiled_time_s=(window[1] - window[0]) * _NS,
        overhead=median(wall_s) / median(live.plain_s) - 1 if live.plain_s else None,
        kernel_s=_time_s(kernels),
        kernels=len(kernels),
        busy_s=_NS * _covered(here),
        launch_bound_s=_NS * _waited_for_host(here, window[0]),
        predicted_s=predicted.time_s,
        predicted_gpu_s=predicted.gpu_time_s,
        tensor_core_s=_time_s(kernel for kernel, _ in tensor),
        unknown_s=_time_s(kernel for kernel, name in read if name.tensor_core is None),
        older_path_s=_time_s(k for k, name in tensor if older_path(name, gpu.compute_capability)),
        communication_s=_time_s(talking),
        exposed_communication_s=_NS * (_covered(here) - _covered(working)),
        waits=_waits(step),
        **parts,
    )


def _communicates(kernel: Kernel) -> bool:
    return kernel.kind == KERNEL and read_name(kernel.name).communication


def _covered(kernels: Sequence[Kernel]) -> int:
    """Nanoseconds in which at least one of them ran; they are in the order of their start."""
    covered = until = 0
    for kernel in kernels:
        covered += max(0, kernel.end_ns - max(kernel.start_ns, until))
        until = max(until, kernel.end_ns)
    return covered


def _waited_for_host(kernels: Sequence[Kernel], start_ns: int) -> int:
    """Nanoseconds without a kernel although the next one had not been launched yet."""
    waited, until = 0, start_ns
    for kernel in kernels:
        launch = kernel.launch
        if launch is not None and kernel.start_ns > until and launch.end_ns > until:
            waited += kernel.start_ns - until
        until = max(until, kernel.end_ns)
    return waited


def _waits(step: AttributedStep) -> tuple[HostWait, ...]:
    together: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for wait in step.waits:
        together[wait.call, wait.operation, wait.module, wait.source].append(wait.duration_ns)
    waits = [HostWait(*where, len(times), _NS * sum(times)) for where, times in together.items()]
    return tuple(sorted(waits, key=lambda wait: -wait.time_s))
