"""From a priced step and its findings to a report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace

from tilefit.cost import Estimate, StepEstimate, estimate_step, step_s
from tilefit.cost.footprint import footprint, usable_bytes
from tilefit.cost.waits import own_work_s
from tilefit.gpus import Gpu
from tilefit.ops import PHASES, Conv, Gemm, Memory, Step, StepOp
from tilefit.ops.scaling import scale_batch
from tilefit.parallel.planning import tokens_of
from tilefit.report.program import Around, Serving
from tilefit.report.report import (
    BatchPoint,
    Device,
    MemoryMoment,
    MemoryUse,
    OpRow,
    Report,
    StepSummary,
    Unmodelled,
)
from tilefit.rules import all_rules
from tilefit.rules.finding import Finding
from tilefit.rules.registry import pages
from tilefit.version import __version__

#: The batch curve ends at this multiple of the step's own batch.
_LARGEST_FACTOR = 64

#: Parts of the step that the timeline of its memory has.
_MOMENTS = 96
#: Modules whose activations are listed.
_MODULES = 12

_Priced = Sequence[tuple[StepOp, Estimate]]


def build(
    step: Step,
    gpu: Gpu,
    estimate: StepEstimate,
    findings: Sequence[Finding],
    profile: str = "",
    *,
    batch_curve: Sequence[BatchPoint] = (),
    environment: Mapping[str, str] | None = None,
    safe_gain_s: float | None = None,
) -> Report:
    """The report of a step on a GPU. Pure: the same arguments give the same report."""
    priced = list(zip(step.ops, estimate.ops, strict=True))
    dtype = main_dtype(step)
    unmodelled = [(entry, time) for entry, time in priced if kind(entry) == "other"]
    return Report(
        model=step.model,
        inputs=step.inputs,
        batch=step.batch,
        settings=step.settings,
        gpu=gpu.name,
        device=Device(
            gpu.title,
            gpu.memory_bytes,
            gpu.memory_bandwidth_bytes_per_s,
            dtype,
            gpu.peak_flop_per_s(dtype),
            gpu.sms,
            {name: gpu.peak_flop_per_s(name) for name in gpu.flop_per_clock_per_sm},
        ),
        step=_summary(step, gpu, estimate, priced),
        coverage=1 - _ratio(sum(entry.op.flop for entry, _ in unmodelled), step.flop),
        coverage_time=1 - _ratio(_time_s(unmodelled), _time_s(priced)),
        unmodelled=_unmodelled(unmodelled),
        findings=tuple(findings),
        ops=tuple(_row(entry, time) for entry, time in priced),
        notes=step.notes,
        version=__version__,
        profile=profile,
        batch_curve=tuple(batch_curve),
        environment=dict(environment or {}),
        safe_gain_s=safe_gain_s,
        tokens=_tokens(step),
        rules=pages((finding.code for finding in findings), all_rules()),
        program=_around(step, gpu, estimate) if step.program else None,
    )


def _tokens(step: Step) -> int:
    """Tokens of a sample. An integer of each may as well be a user, but where a prompt was read before."""
    tokens = tokens_of(step)
    return 0 if tokens == 1 and step.program.was_run and step.prompt is None else tokens


def _around(step: Step, gpu: Gpu, estimate: StepEstimate) -> Around:
    around = Around.of(step.program, estimate.streams, step.ranks)
    around = replace(around, own_s=own_work_s(step.program))
    if step.settings.training or not step.batch:
        return around
    serving = Serving(estimate.time_s, step.batch, tokens_of(step))
    if step.prompt is not None and serving.tokens == 1 < tokens_of(step.prompt):
        prompt_s = step_s(step.prompt, gpu)
        serving = replace(serving, prompt_tokens=tokens_of(step.prompt), prompt_s=prompt_s)
    return replace(around, serving=serving)


def _summary(step: Step, gpu: Gpu, estimate: StepEstimate, priced: _Priced) -> StepSummary:
    rate = _ratio(step.tensor_flop, estimate.time_s)
    return StepSummary(
        time_s=estimate.time_s,
        low_s=estimate.low_s,
        high_s=estimate.high_s,
        gpu_time_s=estimate.gpu_time_s,
        host_time_s=estimate.host_time_s,
        flop=step.flop,
        tensor_flop=step.tensor_flop,
        flop_per_s=rate,
        peak_share=rate / gpu.peak_flop_per_s(main_dtype(step)),
        moved_bytes=sum(entry.op.moved_bytes for entry in step.ops),
        memory_bytes=step.memory.peak_bytes,
        memory=_memory(step, gpu),
        largest_batch=step.largest_batch(usable_bytes(gpu)),
        parameter_count=step.parameter_count,
        op_count=len(step.ops),
        bounds_s=dict(estimate.bound_time_s),
        phases_s=_time_by(priced, lambda entry: entry.phase, PHASES),
        kinds_s=_time_by(priced, kind),
        provenance=estimate.provenance,
    )


def _memory(step: Step, gpu: Gpu) -> MemoryUse:
    memory = step.memory
    peak = memory.timeline.peak()
    return MemoryUse(
        **{each.name: getattr(memory, each.name) for each in fields(Memory) if each.name.endswith("_bytes")},
        share=memory.peak_bytes / gpu.memory_bytes,
        owners=dict(peak.owners),
        modules=_alike(memory.timeline.modules(peak.blocks)),
        peak_op=peak.op,
        timeline=tuple(
            MemoryMoment(each.op, dict(each.owners)) for each in memory.timeline.moments(_MOMENTS)
        ),
        **asdict(footprint(step, gpu)),
    )


def _alike(modules: Mapping[str, int]) -> dict[str, int]:
    """Modules that differ in numbers alone together (``layers.*.mlp``), the most first, as far as listed."""
    together: dict[str, int] = defaultdict(int)
    for path, size in modules.items():
        together[re.sub(r"(?<![^.])\d+(?![^.])", "*", path)] += size
    return dict(sorted(together.items(), key=lambda pair: -pair[1])[:_MODULES])


def batch_curve(step: Step, gpu: Gpu, estimate: StepEstimate) -> tuple[BatchPoint, ...]:
    """The step on powers of two up to 64 times its batch, as far as the GPU's memory goes.

    Args:
        estimate: The price of the step on its own batch.

    Returns:
        The points by increasing batch, the step's own among them; nothing where the batch or the memory is
        not known, where no other batch fits, or of a step that does nothing.
    """
    most = min(step.largest_batch(usable_bytes(gpu)) or 0, _LARGEST_FACTOR * step.batch)
    others = {1 << power for power in range(most.bit_length())} - {step.batch}
    if not others or not estimate.time_s:
        return ()
    points = [_point(step, estimate)]
    for batch in others:
        scaled = scale_batch(step, batch / step.batch)
        points.append(_point(scaled, estimate_step(scaled, gpu)))
    return tuple(sorted(points, key=lambda point: point.batch))


def _point(step: Step, time: StepEstimate) -> BatchPoint:
    return BatchPoint(step.batch, time.time_s, time.low_s, time.high_s, step.memory.peak_bytes)


def kind(entry: StepOp) -> str:
    """``gemm``, ``conv``, ``attention``, ``recurrent``, or the role of a streaming operation."""
    return entry.op.category


def main_dtype(step: Step) -> str:
    """The element type most of the matrix arithmetic is done in; fp32 where there is none."""
    flop: dict[str, int] = defaultdict(int)
    for entry in step.ops:
        if entry.op.multiplies:
            flop[entry.op.dtype] += entry.op.flop
    return max(flop, key=lambda dtype: flop[dtype], default="fp32")


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
        product=_product(entry),
        tile=time.tile,
        waves=time.waves,
        reason=time.reason,
    )


def _product(entry: StepOp) -> tuple[int, int, int, int] | None:
    if not isinstance(entry.op, Gemm | Conv):
        return None
    gemm = entry.op if isinstance(entry.op, Gemm) else entry.op.implicit_gemm
    return gemm.m, gemm.n, gemm.k, gemm.batch


def _unmodelled(priced: _Priced) -> tuple[Unmodelled, ...]:
    names: dict[str, list[tuple[StepOp, Estimate]]] = defaultdict(list)
    for entry, time in priced:
        names[entry.name].append((entry, time))
    rows = [
        Unmodelled(name, len(same), sum(entry.op.moved_bytes for entry, _ in same), _time_s(same))
        for name, same in names.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_s))


def _time_by(priced: _Priced, key: Callable[[StepOp], str], names: Iterable[str] = ()) -> dict[str, float]:
    time_s = dict.fromkeys(names, 0.0)
    for entry, time in priced:
        name = key(entry)
        time_s[name] = time_s.get(name, 0.0) + time.time_s
    return time_s


def _time_s(priced: _Priced) -> float:
    return sum(time.time_s for _, time in priced)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
