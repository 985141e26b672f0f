"""From a priced step and its findings to a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tilefit import __version__
from tilefit.cost import Estimate, StepEstimate
from tilefit.gpus import Gpu
from tilefit.ops import PHASES, Gemm, Memory, Step, StepOp, Streaming
from tilefit.report.report import Device, MemoryUse, OpRow, Report, StepSummary, Unmodelled
from tilefit.rules.finding import Finding

_Priced = Sequence[tuple[StepOp, Estimate]]


def build(
    step: Step, gpu: Gpu, estimate: StepEstimate, findings: Sequence[Finding], profile: str = ""
) -> Report:
    """The report of a step on a GPU. Pure: the same arguments give the same report."""
    priced = list(zip(step.ops, estimate.ops, strict=True))
    dtype = main_dtype(step)
    peak = gpu.peak_flop_per_s(dtype)
    rate = _ratio(step.tensor_flop, estimate.time_s)
    memory = step.memory
    unmodelled = [(entry, time) for entry, time in priced if kind(entry) == "other"]
    return Report(
        model=step.model,
        inputs=step.inputs,
        batch=step.batch,
        settings=step.settings,
        gpu=gpu.name,
        device=Device(gpu.title, gpu.memory_bytes, gpu.memory_bandwidth_bytes_per_s, dtype, peak),
        step=StepSummary(
            time_s=estimate.time_s,
            low_s=estimate.low_s,
            high_s=estimate.high_s,
            gpu_time_s=estimate.gpu_time_s,
            host_time_s=estimate.host_time_s,
            flop=step.flop,
            tensor_flop=step.tensor_flop,
            flop_per_s=rate,
            peak_share=rate / peak,
            moved_bytes=sum(entry.op.moved_bytes for entry in step.ops),
            memory_bytes=memory.peak_bytes,
            memory=MemoryUse(
                parameter_bytes=memory.parameter_bytes,
                gradient_bytes=memory.gradient_bytes,
                optimizer_bytes=memory.optimizer_bytes,
                buffer_bytes=memory.buffer_bytes,
                saved_bytes=memory.saved_bytes,
                peak_bytes=memory.peak_bytes,
                share=memory.peak_bytes / gpu.memory_bytes,
            ),
            largest_batch=largest_batch(memory, step.batch, gpu.memory_bytes),
            parameter_count=step.parameter_count,
            op_count=len(step.ops),
            bounds_s=dict(estimate.bound_time_s),
            phases_s=_time_by(priced, lambda entry, _: entry.phase, PHASES),
            kinds_s=_time_by(priced, lambda entry, _: kind(entry)),
            provenance=estimate.provenance,
        ),
        coverage=1 - _ratio(sum(entry.op.flop for entry, _ in unmodelled), step.flop),
        coverage_time=1 - _ratio(_time_s(unmodelled), _time_s(priced)),
        unmodelled=_unmodelled(unmodelled),
        findings=tuple(findings),
        ops=tuple(_row(entry, time) for entry, time in priced),
        notes=step.notes,
        version=__version__,
        profile=profile,
    )


def kind(entry: StepOp) -> str:
    """``gemm``, ``conv``, ``attention``, ``recurrent``, or the role of a streaming operation."""
    return entry.op.role if isinstance(entry.op, Streaming) else entry.op.kind


def main_dtype(step: Step) -> str:
    """The element type most of the matrix arithmetic is done in; fp32 where there is none."""
    flop: dict[str, int] = defaultdict(int)
    for entry in step.ops:
        if not isinstance(entry.op, Streaming):
            flop[entry.op.dtype] += entry.op.flop
    return max(flop, key=lambda dtype: flop[dtype], default="fp32")


def largest_batch(memory: Memory, batch: int, capacity_bytes: int) -> int | None:
    """Samples whose activations fit beside what does not depend on the batch; None where unknown.

    Without the allocator's fragmentation, library workspaces and the CUDA context, as in
    :class:`~tilefit.ops.Memory`.
    """
    if not batch or not memory.activation_bytes:
        return None
    return max(0, int((capacity_bytes - memory.fixed_bytes) / (memory.activation_bytes / batch)))


def _row(entry: StepOp, time: Estimate) -> OpRow:
    return OpRow(
        kind=kind(entry),
        phase=entry.phase,
        module=entry.site.module,
        source=entry.site.source,
        dtype=entry.op.dtype,
        shape=entry.op.shape,
        layout=entry.op.layout if isinstance(entry.op, Gemm) else "",
        time_s=time.time_s,
        bound=time.bound,
        provenance=time.provenance,
        low_s=time.low_s,
        high_s=time.high_s,
        name=entry.name,
        flop=entry.op.flop,
        moved_bytes=entry.op.moved_bytes,
        kernel_family=time.kernel_family,
    )


def _unmodelled(priced: _Priced) -> tuple[Unmodelled, ...]:
    names: dict[str, list[tuple[StepOp, Estimate]]] = defaultdict(list)
    for entry, time in priced:
        names[entry.name].append((entry, time))
    rows = [
        Unmodelled(name, len(same), sum(entry.op.moved_bytes for entry, _ in same), _time_s(same))
        for name, same in names.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_s))


def _time_by(
    priced: _Priced, key: Callable[[StepOp, Estimate], str], names: Iterable[str] = ()
) -> dict[str, float]:
    time_s = dict.fromkeys(names, 0.0)
    for entry, time in priced:
        name = key(entry, time)
        time_s[name] = time_s.get(name, 0.0) + time.time_s
    return time_s


def _time_s(priced: _Priced) -> float:
    return sum(time.time_s for _, time in priced)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
