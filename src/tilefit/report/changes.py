"""Two reports of a step, operation by operation: what got faster or slower, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

from tilefit import units
from tilefit.errors import UsageError
from tilefit.report import text
from tilefit.report.report import Document, OpRow, Report
from tilefit.rules.finding import Finding
from tilefit.rules.sites import pattern

#: Times that differ by less, relative to the larger one, are the same: the rounding of sums.
_SAME = 1e-9
#: A smaller change of an operation's work does not explain anything.
_WORTH_TELLING = 0.005


@dataclass(frozen=True, slots=True)
class OpChange:
    """Operations that changed in the same way.

    Attributes:
        first, second: What they are in either report, such as ``gemm 16384x768x50257 TN bf16``; empty where
            the report has them not.
        phase: As of :class:`~tilefit.report.report.OpRow`.
        module: Their sites' common pattern.
        count: How many there are.
        first_s, second_s: Their time together; 0 where the report has them not.
        reasons: What is different about them.
    """

    first: str
    second: str
    phase: str
    module: str
    count: int
    first_s: float
    second_s: float
    reasons: tuple[str, ...]

    @property
    def slower_s(self) -> float:
        """By how much they take longer in the second report; negative where they take less."""
        return self.second_s - self.first_s


@dataclass(frozen=True, slots=True)
class Changes:
    """From a first report to a second.

    Attributes:
        first, second: The reports.
        settings: What is different about the steps, what the times rest on, and the GPUs that only one of two
            comparisons has, a phrase each.
        ops: The operations whose time changed, the largest change first. Their changes add up to that of the
            GPU's time.
        gone, new: Findings that only the first report has, and only the second.
    """

    first: Report
    second: Report
    settings: tuple[str, ...]
    ops: tuple[OpChange, ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]


class ChangesOnGpus(tuple[Changes, ...]):
    """The changes on each GPU that both of two comparisons have; on one of two reports."""

    __slots__ = ()


def changes(first: Document, second: Document) -> ChangesOnGpus:
    """From a first report to a second; for comparisons one for each GPU that both have.

    Operations are matched by module, phase and name, those of the same shape first, the others in the order
    of the step.

    Raises:
        UsageError: the two have no GPU in common, or one is of a run that was watched.
    """
    if not first.reports or not second.reports:
        raise UsageError(
            "a run that was watched has no times to compare", hint="Name two reports of tilefit check."
        )
    if len(first.reports) == len(second.reports) == 1:
        return ChangesOnGpus([_changes(first.reports[0], second.reports[0])])
    by_gpu = {report.gpu: report for report in second.reports}
    pairs = [(report, by_gpu[report.gpu]) for report in first.reports if report.gpu in by_gpu]
    if not pairs:
        raise UsageError("the two reports have no GPU in common", hint="Check for the same GPUs.")
    common = {report.gpu for report, _ in pairs}
    alone = [
        f"{text.plain(report.device.title)} only in {side}: not compared"
        for side, document in (("A", first), ("B", second))
        for report in document.reports
        if report.gpu not in common
    ]
    return ChangesOnGpus(_changes(*pair, alone) for pair in pairs)


def _changes(first: Report, second: Report, alone: Sequence[str] = ()) -> Changes:
    before = {(finding.code, finding.module) for finding in first.findings}
    after = {(finding.code, finding.module) for finding in second.findings}
    return Changes(
        first,
        second,
        (*_settings(first, second), *alone),
        tuple(_ops(first, second)),
        tuple(finding for finding in first.findings if (finding.code, finding.module) not in after),
        tuple(finding for finding in second.findings if (finding.code, finding.module) not in before),
    )


_Differing = tuple[str, object, object]


def _settings(first: Report, second: Report) -> Iterator[str]:
    """What is different about the two, a phrase each."""
    yield from _told(
        [
            ("model", first.model, second.model),
            ("inputs", ", ".join(first.inputs), ", ".join(second.inputs)),
            ("batch", first.batch, second.batch),
            ("parameters", first.step.parameter_count, second.step.parameter_count),
            *_behind(first, second),
        ]
    )


def _behind(first: Report, second: Report) -> Iterator[_Differing]:
    """What may give the same operation another time."""
    yield "GPU", first.gpu, second.gpu
    for each in fields(first.settings):
        yield each.name, getattr(first.settings, each.name), getattr(second.settings, each.name)
    counts = [_host_waits(report) for report in (first, second)]
    if None not in counts and (first.program or second.program):
        yield "host waits a step", counts[0], counts[1]
    before, after = ("measured" if report.measured else "predicted" for report in (first, second))
    yield "times", before, after
    if first.gpu == second.gpu:
        yield "measurements", first.profile, second.profile
    yield "tilefit", first.version, second.version


def _host_waits(report: Report) -> int | None:
    """How often the host waits in a step; None where neither a program nor a profiled run tells."""
    if report.measured is not None:
        return sum(wait.count for wait in report.measured.waits)
    return report.program.waits if report.program is not None else None


def _told(pairs: Iterable[_Differing]) -> Iterator[str]:
    for name, before, after in pairs:
        if before != after:
            yield text.plain(f"{name} {_word(before)} -> {_word(after)}")


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value) or "none"


# ---- operation by operation --------------------------------------------------------------------


_Pair = tuple[OpRow | None, OpRow | None]


def _ops(first: Report, second: Report) -> list[OpChange]:
    """The operations whose time changed, those that changed alike together."""
    elsewhere = tuple(_told(_behind(first, second)))
    groups: dict[tuple[object, ...], list[_Pair]] = defaultdict(list)
    for before, after in _matched(first.ops, second.ops):
        either = before or after
        assert either is not None
        if before is not None and after is not None:
            if abs(after.time_s - before.time_s) <= _SAME * max(after.time_s, before.time_s):
                continue
            reasons = tuple(_reasons(before, after)) or elsewhere
        else:
            reasons = (f"only in {'A' if after is None else 'B'}",)
        key = (_label(before, after), _label(after, before), either.phase, reasons)
        groups[key].append((before, after))
    rows = [_row(key, pairs) for key, pairs in groups.items()]
    return sorted(rows, key=lambda row: -abs(row.slower_s))


def _row(key: tuple[object, ...], pairs: Sequence[_Pair]) -> OpChange:
    first, second, phase, reasons = key
    assert isinstance(reasons, tuple)
    return OpChange(
        first=str(first),
        second=str(second),
        phase=str(phase),
        module=pattern(text.plain(op.module) for before, after in pairs for op in (before, after) if op),
        count=len(pairs),
        first_s=sum(before.time_s for before, _ in pairs if before),
        second_s=sum(after.time_s for _, after in pairs if after),
        reasons=reasons,
    )


def _label(op: OpRow | None, other: OpRow | None) -> str:
    """What an operation is; what only one report has, and is no product, goes by its kind: it is many."""
    if op is None:
        return ""
    return op.kind if other is None and op.product is None else text.op_label(op)


def _matched(first: Iterable[OpRow], second: Iterable[OpRow]) -> Iterator[_Pair]:
    before, after = _by(_place, first), _by(_place, second)
    for place in before | after:
        yield from _paired(before.get(place, []), after.get(place, []))


def _paired(first: list[OpRow], second: list[OpRow]) -> Iterator[_Pair]:
    """Operations of one place: as many in their order, else those of the same shape first."""
    if len(first) == len(second):
        yield from zip(first, second, strict=True)
        return
    same, rest = _by(_form, second), []
    taken: set[int] = set()
    for op in first:
        twins = same.get(_form(op))
        if twins:
            twin = twins.pop(0)
            taken.add(id(twin))
            yield op, twin
        else:
            rest.append(op)
    yield from zip_longest(rest, (op for op in second if id(op) not in taken))


def _place(op: OpRow) -> tuple[str, ...]:
    return op.module, op.phase, op.kind, op.name


def _form(op: OpRow) -> tuple[str, ...]:
    return op.shape, op.dtype, op.layout


def _by(key: Callable[[OpRow], tuple[str, ...]], ops: Iterable[OpRow]) -> dict[tuple[str, ...], list[OpRow]]:
    groups: dict[tuple[str, ...], list[OpRow]] = {}
    for op in ops:
        groups.setdefault(key(op), []).append(op)
    return groups


# ---- why ---------------------------------------------------------------------------------------


def _reasons(first: OpRow, second: OpRow) -> Iterator[str]:
    """What is different about an operation, the cause before its effects."""
    if first.product and second.product and first.kind == "gemm":
        sizes = zip(("m", "n", "k", "batch"), first.product, second.product, strict=True)
        yield from (f"{name} {before} -> {after}" for name, before, after in sizes if before != after)
    elif first.shape != second.shape:
        yield f"shape {first.shape} -> {second.shape}"
    if first.dtype != second.dtype:
        yield f"{first.dtype} -> {second.dtype}"
    if first.layout != second.layout:
        yield f"layout {first.layout or 'none'} -> {second.layout or 'none'}"
    if first.kernel_family != second.kernel_family:
        yield f"{first.kernel_family or 'unknown'} -> {second.kernel_family or 'unknown'} kernels"
    if first.measured and second.measured and first.measured.kernels != second.measured.kernels:
        yield f"ran {', '.join(first.measured.kernels)} -> {', '.join(second.measured.kernels)}"
    if first.tile and second.tile and first.tile != second.tile:
        yield f"tile {_times(first.tile)} -> {_times(second.tile)}"
    if first.waves and second.waves and units.number(first.waves) != units.number(second.waves):
        yield f"waves {units.number(first.waves)} -> {units.number(second.waves)}"
    if first.bound != second.bound:
        yield f"limited by {first.bound} -> {second.bound}"
    for what, before, after in (
        ("arithmetic", first.flop, second.flop),
        ("traffic", first.moved_bytes, second.moved_bytes),
    ):
        if before and after and abs(after / before - 1) >= _WORTH_TELLING:
            yield f"{units.number(after / before)} times the {what}"


def _times(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))
