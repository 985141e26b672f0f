"""The report: everything a check found out, as plain data that any renderer can show."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tilefit.ops import Settings
from tilefit.rules.finding import Finding

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Version of the JSON form of a report. It grows when a field changes its meaning or goes away; new fields
#: may appear within a version.
REPORT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Device:
    """What a reader needs to know of the GPU.

    Attributes:
        title: The product's name.
        memory_bytes, memory_bandwidth_bytes_per_s: From its datasheet.
        peak_dtype: The element type most of the step's matrix arithmetic is done in.
        peak_flop_per_s: The GPU's dense peak in that type.
    """

    title: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_dtype: str
    peak_flop_per_s: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of GPU memory, by what they hold; see :class:`tilefit.ops.Memory`.

    Attributes:
        share: The peak as a share of the GPU's memory.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    saved_bytes: int
    peak_bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The step in a few numbers.

    Attributes:
        time_s: Predicted wall time; ``low_s`` and ``high_s`` bound it (80 %).
        gpu_time_s: Time in which the GPU works.
        host_time_s: Time the host needs to launch everything.
        flop: Floating-point operations.
        tensor_flop: Of them, those of matrix products, convolutions, attention and recurrence.
        flop_per_s: ``tensor_flop / time_s``.
        peak_share: That rate as a share of the GPU's dense peak in the main element type.
        moved_bytes: Compulsory memory traffic.
        memory_bytes: The most memory alive at once; ``memory`` says what for.
        largest_batch: Samples that fit the GPU's memory when the activations grow with them; None where
            the batch is not known.
        parameter_count: Parameters of the model, shared ones counted once.
        op_count: Operations.
        bounds_s: The step's time by what limits it: ``math``, ``memory`` and ``latency`` of the GPU, and
            ``launch``, in which the GPU waits for the host.
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
class OpRow:
    """One operation of the step with its estimate, in the order of the step."""

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
    def to_dict(self, *, ops: bool = False) -> dict[str, Any]:
        """JSON-ready data, with every operation where ``ops`` is set."""

    def to_json(self, *, ops: bool = False) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(ops=ops), indent=2, ensure_ascii=False)

    def __rich__(self) -> RenderableType:
        from tilefit.report.terminal import Terminal

        return Terminal(self)

    def _repr_html_(self) -> str:
        from tilefit.report.html import render

        return render(self)

    def __str__(self) -> str:
        from tilefit.report.terminal import render

        return render(self)


@dataclass(frozen=True, slots=True)
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

    @property
    def reports(self) -> tuple[Report, ...]:  # type: ignore[override]  # itself, not a field
        return (self,)

    def to_dict(self, *, ops: bool = False) -> dict[str, Any]:
        data = {"schema_version": REPORT_SCHEMA, **asdict(self)}
        if not ops:
            del data["ops"]
        return data


@dataclass(frozen=True, slots=True)
class Comparison(Document):
    """The same step on several GPUs, side by side."""

    reports: tuple[Report, ...]

    def __getitem__(self, gpu: str) -> Report:
        """The report of one GPU, by its short name."""
        for report in self.reports:
            if report.gpu == gpu:
                return report
        raise KeyError(gpu)

    def to_dict(self, *, ops: bool = False) -> dict[str, Any]:
        return {
            "schema_version": REPORT_SCHEMA,
            "reports": [report.to_dict(ops=ops) for report in self.reports],
        }


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
    return sorted(rows, key=lambda row: (row.best.severity != "error", -row.best.gain_fraction, row.code))
