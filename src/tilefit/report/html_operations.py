"""The operations on the HTML page: the rows of the table, and what selecting one shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilefit import units
from tilefit.report import text
from tilefit.report.html_figures import color
from tilefit.report.report import Report
from tilefit.report.roof import floor_s, peak_dtype, peaks
from tilefit.report.text import OpGroup

#: Whether an operation used them; nothing is said where its kernels' names do not tell.
_TENSOR_CORES = {True: "used", False: "not used", None: ""}


@dataclass(frozen=True, slots=True)
class Row:
    """Operations that are the same but for their site, as the table shows them.

    Attributes:
        group: The operations.
        label: What they are.
        phase: The phase, in short.
        color: The colour class of their kind.
        share: Of the GPU's time.
        each_s: The time of one.
        rate: Of one, in FLOP/s.
        roof_share: The time one would take on the roof, as a share of the predicted time.
    """

    group: OpGroup
    label: str
    phase: str
    color: str
    share: float
    each_s: float
    rate: float
    roof_share: float

    @property
    def measured(self) -> int:
        """How many of them were measured; ``predicted_s`` and ``measured_s`` are of these."""
        return sum(op.measured is not None for op in self.group.ops)

    @property
    def predicted_s(self) -> float | None:
        """Their predicted time together; None where none was measured."""
        times = [op.measured.predicted_s for op in self.group.ops if op.measured]
        return sum(times) if times else None

    @property
    def measured_s(self) -> float:
        """Their measured time together."""
        return sum(op.time_s for op in self.group.ops if op.measured)

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        op = self.group.op
        return op.flop / op.moved_bytes if op.moved_bytes else 0.0


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """One unit for a whole column, so that its numbers can be compared by eye."""

    name: str
    scale_s: float
    decimals: int

    def __call__(self, time_s: float) -> str:
        """A time in the unit of the table."""
        return f"{time_s / self.scale_s:,.{self.decimals}f}"


def time_unit(rows: Sequence[Row]) -> TimeUnit:
    """The unit that suits the longest time of the table."""
    longest_s = max((row.group.time_s for row in rows), default=0.0)
    if longest_s < 1e-3:
        return TimeUnit("µs", 1e-6, 1)
    return TimeUnit("ms", 1e-3, 3 if longest_s < 0.1 else 1)


def rows(report: Report) -> list[Row]:
    """The rows of the table, those that take the most time first."""
    groups = text.grouped(report.ops)
    total_s = sum(group.time_s for group in groups) or 1.0
    found = []
    for group in groups:
        op, each_s = group.op, group.time_s / group.count
        found.append(
            Row(
                group=group,
                label=text.op_label(op),
                phase=text.PHASES[op.phase],
                color=color(op.kind),
                share=group.time_s / total_s,
                each_s=each_s,
                rate=op.flop / each_s if each_s else 0.0,
                roof_share=floor_s(op, report.device) / each_s if each_s else 0.0,
            )
        )
    return found


def data(report: Report, table: Sequence[Row]) -> dict[str, Any]:
    """What the page's script needs, JSON-ready: names are written once and referred to by number."""
    sites: dict[tuple[str, str], int] = {}
    return {
        "rows": [
            {
                "time": row.group.time_s,
                "sites": [
                    sites.setdefault((text.plain(op.module), text.plain(op.source)), len(sites))
                    for op in row.group.ops
                ],
                "facts": _facts(report, row),
                "tiles": _tiles(row) if report.device.sms else None,
                "limits": _limits(report, row),
            }
            for row in table
        ],
        "sites": list(sites),
        "sms": report.device.sms,
    }


def _facts(report: Report, row: Row) -> list[tuple[str, str]]:
    """What is known of one of the operations, as pairs of a name and a text."""
    op, device = row.group.op, report.device
    name = peak_dtype(op, device)
    low_s, high_s = min(op.low_s for op in row.group.ops), max(op.high_s for op in row.group.ops)
    predicted_s = row.predicted_s
    bytes_per_s = op.moved_bytes / row.each_s if row.each_s else 0.0
    count = f"{units.count(row.group.count)} times" if row.group.count > 1 else "once"
    facts = [
        ("runs", f"{count}, {text.PHASE_NAMES[op.phase]}"),
        (
            "time",
            f"{units.seconds(row.each_s)} each ({units.interval(low_s, high_s)}), {op.provenance}",
        ),
        ("predicted", "" if predicted_s is None else units.seconds(predicted_s / row.measured)),
        ("limited by", op.bound),
        (
            "arithmetic",
            f"{units.flop(op.flop)} at {units.rate(row.rate)}, "
            f"{units.share(row.rate / peaks(device)[name])} of the {name} peak",
        ),
        (
            "traffic",
            f"{units.size(op.moved_bytes)} at {units.size(bytes_per_s)}/s, "
            f"{units.share(bytes_per_s / device.memory_bandwidth_bytes_per_s)} of the memory's rate",
        ),
        ("intensity", f"{units.number(row.intensity)} FLOP per byte"),
        ("kernel", text.plain(op.kernel_family)),
        ("because", text.plain(text.because(op.kernel_family, op.reason))),
        (
            "kernels that ran",
            text.plain(", ".join(dict.fromkeys(op.measured.kernels))) if op.measured else "",
        ),
        ("Tensor Cores", _TENSOR_CORES[op.measured.tensor_core] if op.measured else ""),
    ]
    return [(label, value) for label, value in facts if value]


def _limits(report: Report, row: Row) -> list[tuple[str, str, float, str]]:
    """What the GPU needs at best, and what is predicted: (colour class, name, seconds, the same as text)."""
    op, device = row.group.op, report.device
    peak = peaks(device)[peak_dtype(op, device)]
    times = [
        ("math", "the arithmetic, at the peak", op.flop / peak),
        ("memory", "the bytes, at the memory's rate", op.moved_bytes / device.memory_bandwidth_bytes_per_s),
        ("gain", op.provenance, row.each_s),
    ]
    return [(name, label, time_s, units.seconds(time_s)) for name, label, time_s in times]


def _tiles(row: Row) -> dict[str, Any] | None:
    """How the product is cut up: its sizes, the tile, and the thread blocks that share a tile."""
    op = row.group.op
    if op.product is None or op.tile is None or op.waves is None:
        return None
    return {"product": op.product, "tile": op.tile, "waves": op.waves}
