"""Words that several renderers share, and the grouping of what would otherwise repeat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilefit import units
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, OPTIMIZER, PRODUCTS
from tilefit.report.report import Document, MeasuredStep, MemoryUse, OpRow, Report
from tilefit.report.watched import CANNOT, CHECKED, Watched
from tilefit.rules.finding import ERROR, THROUGHPUT, Alarm, Finding
from tilefit.rules.sites import pattern

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")

#: Short names of the phases, for tables.
PHASES = {FORWARD: "fwd", BACKWARD_DATA: "dgrad", BACKWARD_WEIGHT: "wgrad", OPTIMIZER: "opt"}
#: Their names where there is room.
PHASE_NAMES = {
    FORWARD: "forward",
    BACKWARD_DATA: "data gradient",
    BACKWARD_WEIGHT: "weight gradient",
    OPTIMIZER: "optimizer",
}

PROVENANCE = {
    "datasheet": "from the GPU's datasheet",
    "transferred": "carried over from measurements of another GPU",
    "estimated": "from a model fitted to measurements of this GPU",
    "measured": "from measurements of this GPU",
}


def times(provenance: str, profile: str) -> str:
    """What the times rest on, and where the measurements are from."""
    # The measurements that are named are another GPU's, or this one's.
    is_named = provenance == ("transferred" if profile.startswith("the ") else "estimated")
    told = PROVENANCE.get(provenance, "from nothing that is told")
    return f"{told} ({profile})" if profile and is_named else told


def because(family: str, reason: str) -> str:
    """Why kernels of a family run; without the words that none of it could, where it was measured."""
    return reason.partition(": no ")[0] if f": no {family} kernel" in reason else reason


NOTHING = "Nothing worth changing."
NOTHING_WRONG = "Nothing wrong."


def plain(text: str) -> str:
    """One line without control characters: names come from the user's code and may hold anything."""
    return _CONTROL.sub(" ", text).strip()


def heading(report: Report) -> str:
    """``gpt2 · training step``."""
    kind = "training step" if report.settings.training else "inference"
    if report.settings.training and report.program is not None and not report.program.updates:
        kind = "forward and backward pass"
    return f"{plain(report.model) or 'model'} · {kind}"


def setup(report: Report) -> list[str]:
    """What was run, a phrase each: inputs, precision, optimizer, size."""
    settings = report.settings
    names = {"bf16": "bf16 autocast", "fp16": "fp16 autocast", "": "no autocast"}
    optimizer = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}.get(settings.optimizer, settings.optimizer)
    if optimizer and settings.fused_optimizer:
        optimizer = f"fused {optimizer}"
    return [
        *map(plain, report.inputs),
        names[settings.amp],
        *(["TF32"] if settings.tf32 else []),
        *(["channels-last"] if settings.channels_last else []),
        *(["compiled"] if settings.compiled else []),
        *([optimizer] if settings.training and optimizer else []),
        *(
            [f"{units.count(report.step.parameter_count)} parameters"]
            if report.step.parameter_count
            else []  # a trace does not tell
        ),
    ]


#: Places where the host waited that are shown.
_WAITS = 3
#: Share of a step that the GPU waits for the host from which on that is said first. A choice.
_HOST_LIMITS = 0.05
#: Share of the host's time that its work on tensors of the CPU's is told from on. A choice.
_OWN = 0.1


def steps(run: MeasuredStep) -> str:
    """How many steps were profiled: ``3 steps``."""
    return f"{run.steps} steps" if run.steps > 1 else "1 step"


def measured(run: MeasuredStep) -> list[tuple[str, str]]:
    """What a profiled run did, a line each: (label, words)."""
    profiler = "what the profiler adds was not measured"
    if run.overhead is not None:
        profiler = f"under the profiler {'+' if run.overhead >= 0 else ''}{units.share(run.overhead)}"
    steps_s = f"{steps(run)} of {units.seconds(run.time_s)} ({units.interval(run.low_s, run.high_s)})"
    busy = (
        f"busy {run.of_step(run.busy_s)}, waiting for the host's launches {run.of_step(run.launch_bound_s)}"
    )
    kernels = f"{units.count(run.kernels)} kernels of {units.seconds(run.kernel_s)}"
    kinds = [
        ("on Tensor Cores", run.tensor_core_s),
        *([("in older code", run.older_path_s)] if run.older_path_s else []),
        *([("not told", run.unknown_s)] if run.unknown_s else []),
        ("memory-bound", run.memory_bound_s),
        ("of a known module or the optimizer", run.attributed_s),
    ]
    lines = [
        ("Run", f"{steps_s}, predicted {units.seconds(run.predicted_s)}; {profiler}"),
        ("GPU", f"{busy}; {kernels}, predicted {units.seconds(run.predicted_gpu_s)}"),
        ("Kernels", ", ".join(f"{name} {run.of_kernels(time_s)}" for name, time_s in kinds)),
    ]
    if run.communication_s:
        exposed = f"of which {units.seconds(run.exposed_communication_s)} while nothing else ran"
        lines.append(("Between GPUs", f"{units.seconds(run.communication_s)}, {exposed}"))
    for wait in run.waits[:_WAITS]:
        place = " ".join(filter(None, (wait.operation, wait.module, wait.source)))
        times = f"{units.count(wait.count)} times, " if wait.count > 1 else ""
        call = f"{units.seconds(wait.time_s)} in {plain(wait.call)}"
        lines.append(("Host waits", f"{times}{call}" + (f" for {plain(place)}" if place else "")))
    return lines


def gain(finding: Finding) -> str:
    """``saves 24.3 ms (16.4 %)``; not everything has a price."""
    if finding.severity == ERROR:
        return "cannot run"
    if not finding.gain_s:
        return "not priced"
    if finding.safety == THROUGHPUT:
        return f"{times_the_work(finding.gain_fraction)} the throughput"
    return f"saves {units.seconds(finding.gain_s)} ({units.share(finding.gain_fraction)})"


def likely(finding: Finding) -> str:
    """The 80 % interval of what :func:`gain` says; empty where nothing has a price."""
    ends = finding.gain_low_s, finding.gain_high_s
    if finding.safety == THROUGHPUT:
        low, high = (times_the_work(end_s * finding.gain_fraction / finding.gain_s) for end_s in ends)
        return f"{low.removesuffix(' times')} to {high}"
    return units.interval(*ends) if finding.gain_s else ""


def times_the_work(saved: float) -> str:
    """``1.54 times``: work per second, where the step's own work would take less by this share."""
    return f"{units.number(1 / max(1 - saved, 1e-9))} times"


def largest_batch(report: Report) -> str:
    """The samples of a step that fit, ``4 x 174`` of several micro-batches; empty where that is not known."""
    most, parts = report.step.largest_batch, report.program.micro_batches if report.program else 1
    if most is None:
        return ""
    return units.count(most) if parts == 1 else f"{parts} x {units.count(most // parts)}"


def at_most(findings: Iterable[Finding]) -> str:
    """``, saving at most 7.97 ms each``: of findings that are not shown; a larger batch saves nothing."""
    saved = [each.gain_s for each in findings if each.safety != THROUGHPUT]
    if len(saved) > 1:
        return f", saving at most {units.seconds(max(saved))} each"
    return f", saving {units.seconds(saved[0])}" if saved else ""


def price(item: Finding | Alarm) -> str:
    """What a finding saves, or how often an alarm was seen."""
    return gain(item) if isinstance(item, Finding) else seen(item)


def places(item: Finding | Alarm) -> list[str]:
    """Where it is, the more telling first: a finding's module, an alarm's line."""
    found = [site(item), item.source] if isinstance(item, Finding) else [item.source, item.module]
    return [*filter(None, map(plain, found))]


def level(item: Finding | Alarm) -> str:
    """`` (safe)`` of a finding: what its fix may change."""
    return f" ({item.safety})" if isinstance(item, Finding) else ""


def checks(document: Watched, show_all: bool) -> Iterator[tuple[str, str]]:
    """What became of the rules in a run that was watched: all, or those that could not look.

    Yields:
        A word on what follows, and what became of some rules.
    """
    if show_all:
        yield from ((f"{check.code} {check.status}", check.why) for check in document.checks)
        return
    blind = [check.code for check in document.checks if check.status == CANNOT]
    if blind:
        done = sum(check.status == CHECKED for check in document.checks)
        yield "Checked", f"{done} rules; {', '.join(blind)} could not be (--all says why)"


def watched_heading(document: Watched) -> str:
    """``GPT · 20 steps watched``."""
    return f"{plain(document.title)} · {document.steps} steps watched"


def seen(alarm: Alarm) -> str:
    """``error, 6 times from step 2 on``."""
    when = (
        f"in step {alarm.first_step}"
        if alarm.steps == 1
        else f"{alarm.steps} times from step {alarm.first_step} on"
    )
    return f"{alarm.severity}, {when}"


def site(finding: Finding) -> str:
    """``transformer.h.*.mlp.c_fc (12 modules)``."""
    module = plain(finding.module) or "the whole step"
    return f"{module} ({finding.sites} modules)" if finding.sites > 1 else module


def memory(report: Report) -> list[tuple[str, str]]:
    """What fills the memory at its fullest moment, what of that are activations, and what comes on top."""
    use = report.step.memory
    lines = [("Memory", _sizes(held(use)))]
    if use.modules:
        lines.append(
            ("Activations", _sizes({plain(name) or "the model": n for name, n in use.modules.items()}))
        )
    if use.context_bytes:
        beside = {
            "allocator": use.allocator_bytes,
            "libraries": use.library_bytes,
            "CUDA context, about": use.context_bytes,
        }
        lines.append(("Beside them", f"{_sizes(beside)}: {units.capacity(use.taken_bytes)} in all"))
    return lines


def held(use: MemoryUse) -> Mapping[str, int]:
    """The peak by what the bytes hold; of a report that does not tell, by what the step keeps."""
    kept = {
        "parameters": use.parameter_bytes,
        "gradients": use.gradient_bytes,
        "optimizer state": use.optimizer_bytes,
        "buffers": use.buffer_bytes,
        "activations": use.saved_bytes,
    }
    return use.owners or kept | {"working space": max(0, use.peak_bytes - sum(kept.values()))}


def _sizes(of: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {units.capacity(size)}" for name, size in of.items() if size)


def coverage(report: Report) -> str:
    """What share of the step the cost model knows, and what it does not."""
    count = report.step.op_count
    text = (
        f"{units.share(report.coverage)} of the FLOP and {units.share(report.coverage_time)} of the GPU time "
        f"of {units.count(count)} operation{'' if count == 1 else 's'}"
    )
    if report.unmodelled:
        known = ", ".join(
            f"{plain(op.name)} ({op.count}, {units.size(op.moved_bytes)})" for op in report.unmodelled[:3]
        )
        more = len(report.unmodelled) - 3
        text += f"; by bytes alone: {known}" + (f" and {more} more" if more > 0 else "")
    return text


def host_limit(report: Report) -> str:
    """What is to be said first of a step that the host limits; empty for any other."""
    step = report.step
    if step.bounds_s.get("launch", 0.0) < _HOST_LIMITS * step.time_s or not step.time_s:
        return ""
    own_s = report.program.own_s if report.program else 0.0
    own = f" and work on tensors of its own ({units.seconds(own_s)})" * (own_s > _OWN * step.host_time_s)
    launch = f"{units.seconds(step.host_time_s)} to launch it{own}"
    return f"limits this step: {launch}, the GPU works for {units.seconds(step.gpu_time_s)}"


def next_commands(document: Document) -> list[str]:
    """Commands that show more, the first finding's own first."""
    findings = [finding for report in document.reports for finding in report.findings]
    commands = [plain(finding.next_command) for finding in findings[:1] if finding.next_command]
    commands += [f"tilefit rule {finding.code}" for finding in findings[:1]]
    return commands


_COMPARED: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("time", lambda r: units.seconds(r.step.time_s)),
    ("80 % interval", lambda r: units.interval(r.step.low_s, r.step.high_s)),
    ("GPU busy", lambda r: units.seconds(r.step.gpu_time_s)),
    ("host", lambda r: units.seconds(r.step.host_time_s)),
    ("rate", lambda r: units.rate(r.step.flop_per_s)),
    ("share of peak", lambda r: units.share(r.step.peak_share)),
    ("memory used", lambda r: units.share(r.step.memory.share)),
    ("largest batch", lambda r: largest_batch(r) or "unknown"),
    ("findings", lambda r: str(len(r.findings))),
)


def compared(reports: Sequence[Report]) -> list[list[str]]:
    """What a comparison of GPUs shows of each: a row of a label and a cell for each report."""
    return [[label, *map(cell, reports)] for label, cell in _COMPARED]


def gain_cell(finding: Finding | None) -> str:
    """A finding's gain in a table, a dash where the GPU does not have it."""
    if finding is None:
        return "–"
    if finding.severity == ERROR or not finding.gain_s:
        return gain(finding)
    if finding.safety == THROUGHPUT:
        return times_the_work(finding.gain_fraction)
    return units.share(finding.gain_fraction)


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Operations that are the same but for their site.

    Attributes:
        op: One of them.
        count: How many there are.
        time_s: Their time together.
        module: Their sites' common pattern.
        ops: All of them.
    """

    op: OpRow
    count: int
    time_s: float
    module: str
    ops: tuple[OpRow, ...]


def grouped(ops: Iterable[OpRow]) -> list[OpGroup]:
    """Identical operations together, those that take the most time first."""
    groups: dict[tuple[str, ...], list[OpRow]] = {}
    for op in ops:
        key = (_what(op), op.phase, op.shape, op.dtype, op.layout, op.bound, op.kernel_family)
        groups.setdefault(key, []).append(op)
    rows = [
        OpGroup(
            op=same[0],
            count=len(same),
            time_s=sum(op.time_s for op in same),
            module=pattern(op.module for op in same),
            ops=tuple(same),
        )
        for same in groups.values()
    ]
    return sorted(rows, key=lambda row: -row.time_s)


def op_rows(report: Report) -> list[dict[str, str]]:
    """The table of operations by time: cells by heading, one that starts with ``>`` over numbers."""
    groups = grouped(report.ops)
    total_s = sum(group.time_s for group in groups) or 1.0
    rows = []
    for group in groups:
        measured = zip(("cores", ">predicted", ">roof"), _measured_cells(group), strict=True)
        rows.append(
            {
                ">time": units.seconds(group.time_s),
                ">share": units.share(group.time_s / total_s),
                ">count": str(group.count),
                "operation": op_label(group.op),
                "phase": PHASES[group.op.phase],
                "bound": group.op.bound,
                **(dict(measured) if report.measured else {}),
                "module": plain(group.module),
            }
        )
    return rows


def _measured_cells(group: OpGroup) -> tuple[str, str, str]:
    """Of a group that was measured: Tensor Cores or not, predicted time, and the share of the GPU's roof."""
    ran = [op.measured for op in group.ops if op.measured is not None]
    if not ran:
        return "", "", ""
    uses = {op.tensor_core for op in ran}
    cores = "tensor" if True in uses else "?" if None in uses else "no"
    if any(op.older_path for op in ran):
        cores = "older"
    roof = sum(op.roof_share for op in ran) / len(ran)
    return cores, units.seconds(sum(op.predicted_s for op in ran)), units.share(roof) if roof else ""


def op_label(op: OpRow) -> str:
    """What an operation is, as a person would say it: ``gemm 16384x768x50257 TN bf16``."""
    return plain(" ".join(part for part in (_what(op), op.shape, op.layout, op.dtype) if part))


def _what(op: OpRow) -> str:
    # A product's shape says everything; of the others the framework's name is told too.
    return op.kind if op.kind in PRODUCTS or not op.name else op.name.removeprefix("aten.")
