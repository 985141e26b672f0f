"""The report: everything a check found out, as plain data that any renderer can show."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefit import units
from tilefit.errors import UsageError
from tilefit.formats import make, render, renders, save
from tilefit.ops import Settings
from tilefit.report.program import Around
from tilefit.rules.finding import ERROR, SAFE, THROUGHPUT, Finding, RulePage

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType

#: Version of the JSON form of a report. It grows when a field changes its meaning or goes away; new fields
#: may appear within a version, and have a default, so that what was written without them still opens.
REPORT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Device:
    """What a reader needs to know of the GPU.

    Attributes:
        title: The product's name.
        memory_bytes, memory_bandwidth_bytes_per_s: From its datasheet.
        peak_dtype: The element type most of the step's matrix arithmetic is done in.
        peak_flop_per_s: The GPU's dense peak in that type.
        sms: Streaming multiprocessors; 0 where unknown.
        peaks_flop_per_s: The dense peak of every element type the GPU has a path for.
    """

    title: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_dtype: str
    peak_flop_per_s: float
    sms: int = 0
    peaks_flop_per_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """The fullest moment of a part of the step.

    Attributes:
        op: The operation that is about to be launched then, counted from 0.
        owners: Bytes by what they hold.
    """

    op: int
    owners: dict[str, int]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of GPU memory, by what they hold; see :class:`tilefit.ops.Memory`.

    Attributes:
        share: The peak as a share of the GPU's memory.
        owners: The peak by what the bytes hold; they add up to it. Empty where only the peak is known.
        modules: The activations among them by the modules that made them, the most first; modules that differ
            in numbers alone together (``layers.*.mlp``).
        peak_op: The operation that is about to be launched at the peak, counted from 0.
        timeline: The fullest moments of equal parts of the step, in order.
        allocator_bytes: On top of the peak, what the caching allocator's rounding and fragmentation take.
        library_bytes: Workspaces of cuBLAS, and of cuDNN beyond the peak.
        context_bytes: The CUDA context.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    saved_bytes: int
    peak_bytes: int
    share: float
    owners: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)
    peak_op: int = 0
    timeline: tuple[MemoryMoment, ...] = ()
    allocator_bytes: int = 0
    library_bytes: int = 0
    context_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """The peak with what is taken beside it."""
        return self.peak_bytes + self.allocator_bytes + self.library_bytes + self.context_bytes


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The step in a few numbers.

    Attributes:
        time_s: Predicted wall time; ``low_s`` and ``high_s`` bound it (80 %).
        gpu_time_s: Time in which the GPU works.
        host_time_s: Time the host needs to launch everything, its own waits left out.
        flop: Floating-point operations.
        tensor_flop: Of them, those of matrix products, convolutions, attention and recurrence.
        flop_per_s: ``tensor_flop / time_s``.
        peak_share: That rate as a share of the GPU's dense peak in the main element type.
        moved_bytes: Compulsory memory traffic.
        memory_bytes: The most memory alive at once; ``memory`` says what for.
        largest_batch: Samples that fit what tensors can take of the GPU's memory (94 %, as in BAT002) if the
            activations grow with them; None where the batch is not known.
        parameter_count: Parameters of the model, shared ones counted once.
        op_count: Operations.
        bounds_s: The step's time by what limits it: ``math``, ``memory`` and ``latency`` of the GPU, and
            ``launch``, in which the GPU waits for the host; of a program ``waits``, in which its queue is
            empty because the host waited, or a copy runs.
        phases_s: GPU time by phase.
        kinds_s: GPU time by kind of operation.
        provenance: Where most of the predicted time comes from: ``datasheet``, ``estimated`` or ``measured``.
    """

    time_s: float
    low_s: float
    high_s: float
    gpu_time_s: float
    host_time_s: float
    flop: int
    tensor_flop: int
    flop_per_s: float
    peak_share: float
    moved_bytes: int
    memory_bytes: int
    memory: MemoryUse
    largest_batch: int | None
    parameter_count: int
    op_count: int
    bounds_s: dict[str, float]
    phases_s: dict[str, float]
    kinds_s: dict[str, float]
    provenance: str


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """An operation of which only the bytes are known.

    Attributes:
        name: The framework's name.
        count: How often it runs.
        moved_bytes: Its traffic, all runs together.
        time_s: The time that traffic takes.
    """

    name: str
    count: int
    moved_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Combination:
    """Several findings followed together.

    Attributes:
        findings: Their indices in the report.
        time_s: The step's predicted time then, no saving counted twice.
    """

    findings: tuple[int, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """The step on another batch, priced in the same way.

    Attributes:
        batch: Samples.
        time_s: Predicted wall time; ``low_s`` and ``high_s`` bound it (80 %).
        memory_bytes: The most memory alive at once.
    """

    batch: int
    time_s: float
    low_s: float
    high_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """What one operation did in a profiled run; its row's ``time_s`` is then the measured time.

    Attributes:
        predicted_s: What the model had predicted.
        kernels: Short names of the GPU kernels of one step, in order.
        tensor_core: It multiplied on the Tensor Cores; None where the kernels' names do not tell.
        older_path: It used Tensor Core code of an older generation than the GPU's.
        flop_per_s, bytes_per_s: What was achieved; 0 where its work or its bytes are not known.
        roof_share: The least time the GPU's datasheet allows over the measured time; 0 where not known.
    """

    predicted_s: float
    kernels: tuple[str, ...]
    tensor_core: bool | None
    older_path: bool
    flop_per_s: float
    bytes_per_s: float
    roof_share: float


@dataclass(frozen=True, slots=True)
class HostWait:
    """A place where the host waited for the GPU.

    Attributes:
        call: The CUDA call that waited.
        operation: The operation it was made for; may be empty.
        module, source: Where; may be empty.
        count: How often in one step.
        time_s: Seconds waited in one step.
    """

    call: str
    operation: str
    module: str
    source: str
    count: int
    time_s: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A profiled run in a few numbers; times are those of one step, the median of several.

    Attributes:
        source: What was profiled: ``a run``, or the name of a trace.
        steps: Steps that were profiled.
        time_s: Wall time of a step; without the profiler where ``overhead`` is known.
        low_s, high_s: The least and the most of the steps.
        profiled_time_s: Wall time under the profiler, which the times below are shares of.
        overhead: What the profiler added, as a share of the time without it; None where that is not known.
        kernel_s: Sum of the times of everything that ran on the GPU; ``kernels`` is how many.
        busy_s: Time in which something ran on the GPU.
        launch_bound_s: Time in which the GPU had nothing to do until the host launched the next kernel.
        predicted_s, predicted_gpu_s: What the model had predicted for the step, and for its kernels.
        attributed_s: Part of ``kernel_s`` that belongs to a known module or to the optimizer.
        tensor_core_s: Part of it in kernels that multiply on the Tensor Cores; ``unknown_s`` in kernels whose
            names do not tell; ``older_path_s`` in Tensor Core code of an older generation than the GPU's.
        memory_bound_s: Part of it in operations that memory bounds.
        communication_s: Part of it in communication between GPUs; ``exposed_communication_s`` of that while
            nothing else ran.
        waits: Where the host waited for the GPU, longest first.
        unmatched_s: Part of it in operations that the captured step does not have.
    """

    source: str
    steps: int
    time_s: float
    low_s: float
    high_s: float
    profiled_time_s: float
    overhead: float | None
    kernel_s: float
    kernels: int
    busy_s: float
    launch_bound_s: float
    predicted_s: float
    predicted_gpu_s: float
    attributed_s: float
    tensor_core_s: float
    unknown_s: float
    older_path_s: float
    memory_bound_s: float
    communication_s: float
    exposed_communication_s: float
    waits: tuple[HostWait, ...] = ()
    unmatched_s: float = 0.0

    def of_step(self, time_s: float) -> str:
        """A time as a share of the step under the profiler."""
        return units.share(time_s / self.profiled_time_s if self.profiled_time_s else 0.0)

    def of_kernels(self, time_s: float) -> str:
        """A time as a share of that of the kernels."""
        return units.share(time_s / self.kernel_s if self.kernel_s else 0.0)


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operation of the step with its estimate, in the order of the step.

    Attributes:
        product: Rows and columns of the result, contraction and count of the matrix product that it is, or
            that a convolution is computed as; None for the others.
        tile, waves, reason: As of :class:`tilefit.cost.Estimate`.
        measured: What it did in a profiled run; None without one, and where the run has no trace of it.
    """

    kind: str
    phase: str
    module: str
    source: str
    dtype: str
    shape: str
    layout: str
    time_s: float
    bound: str
    provenance: str
    low_s: float
    high_s: float
    name: str
    flop: int
    moved_bytes: int
    kernel_family: str
    product: tuple[int, int, int, int] | None = None
    tile: tuple[int, int] | None = None
    waves: float | None = None
    reason: str = ""
    measured: MeasuredOp | None = None


class Document(ABC):
    """One report or several: what every renderer can show, and shows itself.

    Attributes:
        reports: One report per GPU.
    """

    __slots__ = ()

    reports: tuple[Report, ...]

    @property
    def exit_code(self) -> int:
        """1 where something was found, else 0."""
        return int(any(report.findings for report in self.reports))

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: all that there is, so that any renderer can show it later."""

    def to_json(self) -> str:
        """:meth:`to_dict` as text; :func:`tilefit.report.load` opens it again."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_html(self, *, price: float | None = None) -> str:
        """A page of its own: one file that needs nothing else, with every operation.

        ``price``: of a GPU for an hour; the page then says what work costs.
        """
        return render(self, "html", prices=None if price is None else {"": price})

    def save(self, path: str | os.PathLike[str], format: str = "") -> None:
        """Write it to a file, ``report.save("step.html")``; without a format in that of the ending.

        Raises:
            UsageError: there is no such format, the ending is that of none, or the file cannot be written.
        """
        save(self, Path(path), format)

    def to_pandas(self, rows: str = "ops") -> pandas.DataFrame:
        """A table with a row for each operation, or for each of the ``findings``; ``gpu`` comes first.

        Raises:
            UsageError: pandas is not installed, or there are no such rows.
        """
        try:
            import pandas
        except ImportError as error:
            raise UsageError("pandas is not installed", hint="Run: pip install pandas.") from error
        tables = self.reports or (self,)
        if rows not in ("ops", "findings") or not all(hasattr(table, rows) for table in tables):
            raise UsageError(f"there are no rows {rows!r}", hint="Take the findings: to_pandas('findings').")
        return pandas.DataFrame(
            {"gpu": getattr(table, "gpu", ""), **{each.name: getattr(row, each.name) for each in fields(row)}}
            for table in tables
            for row in getattr(table, rows)
        )

    def __repr__(self) -> str:
        """What it is, in a line: every operation would fill a prompt's window."""
        of = "; ".join(
            f"{report.model} on {report.gpu}: {units.seconds(report.step.time_s)}, "
            f"{units.counted(len(report.findings), 'finding')}"
            for report in self.reports
        )
        return f"<{type(self).__name__} {of}>"

    def __rich__(self) -> RenderableType:
        shown: RenderableType = make(self)
        return shown

    def _repr_html_(self) -> str:
        return render(self, "notebook")

    def __str__(self) -> str:
        return render(self)


@renders(Document, "json")
def _json(document: Document) -> str:
    return f"{document.to_json()}\n"


@dataclass(frozen=True, slots=True, repr=False)
class Report(Document):
    """What a step costs on one GPU, and what is worth changing.

    Attributes:
        model: What was checked.
        inputs: Name, element type and shape of each input.
        batch: Samples, or 0 where unknown.
        settings: How the step runs.
        gpu: The GPU's short name; ``device`` holds its facts.
        step: The step in a few numbers.
        coverage: Share of the floating-point operations that belong to operations the cost model knows.
        coverage_time: The same share of the predicted GPU time.
        unmodelled: What coverage misses.
        findings: What is worth changing, best first. Gains overlap: they do not add up.
        ops: Every operation.
        notes: What a reader must know about the capture.
        version: The version of tilefit.
        profile: Where the measurements behind the estimates are from; empty where there are none.
        batch_curve: The step on other batches that fit the GPU's memory, and on its own, by increasing batch.
        environment: Versions of what the step was captured with, by name.
        safe_gain_s: What the findings with a safe fix save together, in seconds per step, no operation's time
            counted twice; None where it was not priced. See :func:`tilefit.rules.safe_gain_s`.
        combinations: The step's time with each choice of the findings that save most.
        tokens: Of a sample; 0 where its inputs are none.
        rules: The documentation of the rules behind the findings.
        measured: The profiled run that the times are from; None where they are predicted.
        program: The program around the step; None where a model was captured.
    """

    model: str
    inputs: tuple[str, ...]
    batch: int
    settings: Settings
    gpu: str
    device: Device
    step: StepSummary
    coverage: float
    coverage_time: float
    unmodelled: tuple[Unmodelled, ...]
    findings: tuple[Finding, ...]
    ops: tuple[OpRow, ...]
    notes: tuple[str, ...]
    version: str
    profile: str = ""
    batch_curve: tuple[BatchPoint, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    safe_gain_s: float | None = None
    combinations: tuple[Combination, ...] = ()
    tokens: int = 0
    rules: tuple[RulePage, ...] = ()
    measured: MeasuredStep | None = None
    program: Around | None = None

    @property
    def waste(self) -> float:
        """Share of the step's predicted time that the findings with a safe fix would save together.

        No operation's time is counted twice; see ``safe_gain_s``. Where that was not priced, it is the
        largest saving of one of them.
        """
        if self.safe_gain_s is None:
            return max((f.gain_fraction for f in self.findings if f.safety == SAFE), default=0.0)
        return self.safe_gain_s / self.step.time_s if self.step.time_s else 0.0

    @property
    def reports(self) -> tuple[Report, ...]:  # type: ignore[override]  # itself, not a field
        """Itself."""
        return (self,)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        values = {"schema_version": REPORT_SCHEMA, **asdict(self)}
        if self.program is None:
            del values["program"]
        return values


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Document):
    """The same step on several GPUs, side by side."""

    reports: tuple[Report, ...]

    def __getitem__(self, gpu: str) -> Report:
        """The report of one GPU, by its short name."""
        for report in self.reports:
            if report.gpu == gpu:
                return report
        raise KeyError(gpu)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {"schema_version": REPORT_SCHEMA, "reports": [report.to_dict() for report in self.reports]}


@dataclass(frozen=True, slots=True)
class FoundOn:
    """One finding across the GPUs of a comparison: the finding on each, or None where it does not arise."""

    code: str
    module: str
    per_gpu: tuple[Finding | None, ...]

    @property
    def best(self) -> Finding:
        """The one that saves the largest share of its step."""
        return max((f for f in self.per_gpu if f), key=lambda finding: finding.gain_fraction)


def across(reports: Sequence[Report]) -> list[FoundOn]:
    """The findings of several reports, matched by rule and site; those that matter most first."""
    keys = {(finding.code, finding.module): None for report in reports for finding in report.findings}
    rows = []
    for code, module in keys:
        per_gpu = tuple(
            next((f for f in report.findings if (f.code, f.module) == (code, module)), None)
            for report in reports
        )
        rows.append(FoundOn(code, module, per_gpu))
    return sorted(rows, key=_rank)


def _rank(row: FoundOn) -> tuple[bool, bool, float, str]:
    best = row.best
    return best.severity != ERROR, best.safety == THROUGHPUT, -best.gain_fraction, row.code
