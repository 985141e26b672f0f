"""A trace with what was found in it, for Perfetto (ui.perfetto.dev) or ``chrome://tracing``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilefit import units
from tilefit.errors import UsageError
from tilefit.profiling.attribution import AttributedStep
from tilefit.profiling.chrome import Event, read_events
from tilefit.report import Report
from tilefit.rules.finding import Finding

#: The tracks that are added; far from any process of the system.
_PROCESS = 1 << 30
_OPERATIONS, _MODULES, _FINDINGS = 1, 2, 3


def annotate(trace: Path, steps: list[AttributedStep], report: Report, output: Path) -> None:
    """Write a trace again with three tracks more: operations, modules and findings, as the GPU ran them.

    Args:
        trace: What the profiler exported.
        steps: Its steps, with the modules of their calls.
        report: What was found in it.
        output: ``.json``, or ``.json.gz`` to be compressed.

    Raises:
        TilefitError: the trace cannot be read.
        UsageError: the file cannot be written, or is the trace itself.
    """
    if output.exists() and output.samefile(trace):
        raise UsageError(
            "is the trace itself, which would be overwritten while it is read",
            where=str(output),
            hint="Export to another file.",
        )
    opener: Any = gzip.open if output.suffix == ".gz" else open
    header: dict[str, Any] = {}
    try:
        with opener(output, "wt", encoding="utf-8") as file:
            file.write('{"traceEvents": [\n')
            for event in read_events(trace, header.__setitem__):
                file.write(json.dumps(event, separators=(",", ":")) + ",\n")
            file.write(",\n".join(json.dumps(event) for event in _tracks(steps, report)))
            rest = "".join(f",\n{json.dumps(name)}: {json.dumps(value)}" for name, value in header.items())
            file.write(f"\n]{rest}}}\n")
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(output)) from error


def _tracks(steps: list[AttributedStep], report: Report) -> Iterator[Event]:
    yield _name("process_name", 0, f"tilefit {report.version}: {report.model} on {report.device.title}")
    for track, title in ((_OPERATIONS, "operations"), (_MODULES, "modules"), (_FINDINGS, "findings")):
        yield _name("thread_name", track, title)
    by_module = _by_module(report)
    for step in steps:
        last_module: tuple[str, str] | None = None
        module_start = module_end = 0
        for call in step.calls:
            start = min(kernel.start_ns for kernel in call.kernels)
            end = max(kernel.end_ns for kernel in call.kernels)
            where = {"module": call.module, "source": call.source, "phase": call.phase}
            yield _slice(_OPERATIONS, call.name, start, end, where)
            for finding in by_module.get(call.module or "", ()):
                yield _found(finding, start, end)
            here = (call.module or "", call.phase)
            if here != last_module:
                if last_module is not None:
                    yield _slice(_MODULES, " ".join(last_module), module_start, module_end, {})
                last_module, module_start = here, start
            module_end = end
        if last_module is not None:
            yield _slice(_MODULES, " ".join(last_module), module_start, module_end, {})
        end = max(kernel.end_ns for call in step.calls for kernel in call.kernels)
        for finding in report.findings:
            if not finding.module:
                yield _found(finding, step.start_ns, end)


def _by_module(report: Report) -> dict[str, list[Finding]]:
    """Findings by the path of each module they are about."""
    modules = {row.module for row in report.ops}
    found: dict[str, list[Finding]] = {}
    for finding in report.findings:
        pattern = finding.module.replace("…", "*")
        for module in modules:
            if pattern and fnmatchcase(module, pattern):
                found.setdefault(module, []).append(finding)
    return found


def _found(finding: Finding, start_ns: int, end_ns: int) -> Event:
    facts = {
        "saves": units.seconds(finding.gain_s),
        "share of the step": units.share(finding.gain_fraction),
        "fix": finding.fix,
        "arithmetic": list(finding.arithmetic),
        "source": finding.source,
    }
    return _slice(_FINDINGS, f"{finding.code} {finding.message}", start_ns, end_ns, facts)


def _slice(track: int, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> Event:
    when = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "cat": "tilefit", "name": name, "pid": _PROCESS, "tid": track, **when, "args": args}


def _name(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}
